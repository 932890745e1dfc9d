"""What several frontends share through control: names of requests, the use of keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.wire.messages import ClaimNames, KeyCount, KeyUse, KeyUses, NamesClaimed, ReleaseNames

from .harness import FakeWorker, Stage, stage, wait_for


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(Path(tmp_path_factory.mktemp("s")), frontends=2) as made:
        made.start_control()
        yield made


def claim(frontend: FakeWorker, number: int, *names: str) -> bool:
    frontend.link.send(ClaimNames(id=number, names=names))
    answers = lambda: [m for m in frontend.shared if isinstance(m, NamesClaimed) and m.id == number]  # noqa: E731
    return bool(wait_for(answers, "control's word")[0].granted)


def test_a_name_is_held_by_one_frontend_until_it_releases_it_or_ends_and_a_new_control_knows(made: Stage) -> None:
    _, _, first = made.to_ready()
    second = next(w for w in made.workers if w.name == "frontend-1")
    assert claim(first, 1, "a", "b")
    assert not claim(second, 1, "b", "c")
    assert claim(second, 2, "c"), "a refused claim holds nothing"
    first.link.send(ReleaseNames(names=("a", "b")))
    assert claim(first, 2, "d")
    assert claim(second, 3, "b")
    second.link.send(ReleaseNames(names=("d",)))
    assert not claim(second, 4, "d"), "nobody releases what is another's"
    first.held, second.held = ("d",), ("b", "c")
    made.kill_control()
    made.start_control(incarnation=2)
    made.wait_state("ready")
    assert not claim(second, 5, "d") and not claim(first, 5, "b")
    first.link.close()
    made.supervisor.died("frontend-0")
    wait_for(lambda: "frontend-0 is away" in made.status()["degraded"], "it is gone")
    assert claim(second, 6, "d")


def test_what_one_frontend_tells_of_keys_all_hear(made: Stage) -> None:
    _, _, first = made.to_ready()
    second = next(w for w in made.workers if w.name == "frontend-1")
    use = KeyUse(frontend=0, incarnation=1, keys={"user": KeyCount(3, 40, 60, None, 57.0, 0.0)})
    first.link.send(use)
    for frontend in (first, second):
        heard = wait_for(lambda worker=frontend: [m for m in worker.shared if isinstance(m, KeyUses)], "the use")
        assert heard[0].uses == [use]
