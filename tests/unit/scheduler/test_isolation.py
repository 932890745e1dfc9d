"""A request that ends steps, or engines, costs itself and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmd.model.batch import ForwardBatch, SampleRequest, SampleResult
from llmd.plan.journal import HEAD, died_alone
from llmd.scheduler import journal as journals
from llmd.scheduler.journal import Journal
from llmd.scheduler.kv import KvManager
from llmd.scheduler.suspects import Suspects
from tests.unit.scheduler.harness import Bench, CheckingRunner, oracle

POISON = 66


class Died(BaseException):
    """The process is no more."""


class Poisoned(CheckingRunner):
    """Ends with `end` where a step computes a prompt with a certain token in it."""

    def __init__(self, kv: KvManager, end: type[BaseException]) -> None:
        super().__init__(kv)
        self.end = end

    def step(self, batch: ForwardBatch, wanted: list[SampleRequest]) -> list[SampleResult]:
        if any(token == POISON and position < 3 for token, position in zip(batch.input_ids, batch.positions, strict=True)):
            raise self.end
        return super().step(batch, wanted)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def innocent(number: int) -> list[int]:
    return [number, 7, number]


def test_who_makes_steps_fail_fails_alone(overlap: bool) -> None:
    bench = Bench(overlap=overlap, runner=lambda kv: Poisoned(kv, ArithmeticError), max_running=32, pages=256)
    for number in range(12):
        bench.send(f"r{number}", innocent(number), 12)
        if number % 4 == 1:
            bench.turn()
        if number == 6:
            bench.send("poison", [1, 2, POISON], 5)
    bench.run()
    bench.close()
    assert bench.out.errors == {"poison": "internal_error"}
    assert all(bench.out.tokens[f"r{number}"] == oracle(innocent(number), 12) for number in range(12))
    assert not bench.scheduler.suspects.any
    assert bench.counter("llmd_requests_retracted_total") == 0, "no memory was short"


class Engines:
    """One engine after the other: who dies is followed by one that gets what had not been finished, as frontends would send it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.deaths: list[bool] = []
        """Of each, whether it was alone with a suspect."""
        self.tokens: dict[str, list[int]] = {}
        self.errors: dict[str, str | None] = {}

    def start(self) -> Bench:
        epoch = len(self.deaths) + 1
        suspects = Suspects(self.directory / "suspects", "s")
        if self.deaths:
            suspects.learn(journals.read(self.directory / "step", epoch))
        journal = Journal(self.directory / "step", epoch, 64)
        return Bench(runner=lambda kv: Poisoned(kv, Died), max_running=32, pages=256, suspects=suspects, journal=journal)

    def run(self, prompts: dict[str, list[int]], count: int) -> None:
        while left := [rid for rid in prompts if rid not in self.errors and len(self.tokens.get(rid, [])) < count]:
            bench = self.start()
            for rid in left:
                bench.send(rid, prompts[rid], count, output_ids=self.tokens.get(rid, []), resumed=bool(self.deaths))
            try:
                bench.run()
            except Died:
                self.deaths.append(died_alone((self.directory / "step").read_bytes()[: HEAD.size], len(self.deaths) + 1))
            finally:
                self.tokens |= bench.out.tokens
                self.errors |= bench.out.errors
            assert len(self.deaths) < 10


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def test_who_ends_engines_is_found_out_after_four_of_them(engines: Engines) -> None:
    prompts = {f"r{number}": innocent(number) for number in range(16)} | {"poison": [3, POISON, 4]}
    engines.run(prompts, 10)
    assert engines.errors == {"poison": "engine_crash"}
    assert engines.deaths == [False, False, True, True]
    assert all(engines.tokens[rid] == oracle(prompts[rid], 10) for rid in prompts if rid != "poison")


def test_whatever_asks_for_the_same_is_refused_for_a_while(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.run({"poison": [3, POISON, 4]}, 10)
    assert engines.deaths == [False, False, True, True]
    engines.run({"again": [3, POISON, 4], "other": [3, 4]}, 10)
    assert engines.errors == {"poison": "engine_crash", "again": "engine_crash"} and len(engines.deaths) == 4
    assert engines.tokens["other"] == oracle([3, 4], 10)
    monkeypatch.setattr("llmd.scheduler.suspects.time.monotonic", lambda: 1e9)
    engines.run({"later": [3, POISON, 4]}, 10)
    assert len(engines.deaths) == 8


def test_who_was_there_when_engines_died_and_gets_on_is_cleared(tmp_path: Path) -> None:
    bench = Bench()
    bench.send("a", [1, 2], 20)
    bench.turn()
    req = bench.scheduler.decode.running["a"]
    suspects = Suspects(tmp_path / "suspects", "s")
    for _ in range(2):
        suspects.learn(journals.Last(False, {req.mark: 12}))
    assert suspects.suspected(req)
    suspects.got_on(req)
    assert suspects.suspected(req)
    while req.settled < 12:
        bench.turn()
    suspects.got_on(req)
    assert not suspects.any
    suspects.save()
    assert not Suspects(tmp_path / "suspects", "s").any


def test_one_death_accuses_nobody_and_memory_of_another_start_counts_for_nothing(tmp_path: Path) -> None:
    bench = Bench()
    bench.send("a", [1, 2], 20)
    bench.turn()
    req = bench.scheduler.decode.running["a"]
    suspects = Suspects(tmp_path / "suspects", "s")
    suspects.learn(journals.Last(True, {req.mark: 12}))
    assert suspects.any and not suspects.suspected(req)
    assert Suspects(tmp_path / "suspects", "s").any
    assert not Suspects(tmp_path / "suspects", "other").any
    (tmp_path / "suspects").write_bytes(b"\xc1 damaged")
    assert not Suspects(tmp_path / "suspects", "s").any


def test_a_journal_tells_of_the_step_that_ran_and_of_no_other(tmp_path: Path) -> None:
    bench = Bench()
    bench.send("a", [1, 2], 20)
    bench.turn()
    req = bench.scheduler.decode.running["a"]
    path = tmp_path / "step"
    assert journals.read(path, 4) is None
    journal = Journal(path, 3, capacity=2)
    assert journals.read(path, 4) is None
    journal.begin([(req, 17)] * 3, alone=True)
    assert journals.read(path, 4) == journals.Last(True, {req.mark: 17})
    assert journals.read(path, 5) is None, "not the one before"
    assert died_alone(path.read_bytes(), 3) and not died_alone(path.read_bytes(), 2) and not died_alone(b"", 3)
    journal.end()
    assert journals.read(path, 4) is None and not died_alone(path.read_bytes(), 3)
    path.write_bytes(path.read_bytes()[:20])
    assert journals.read(path, 4) is None
