"""What a rank shows of its requests and prefixes."""

from __future__ import annotations

from llmd.scheduler.tables import SchedulerTables
from tests.unit.scheduler.harness import PAGE, Bench


def test_rows_follow_a_request_from_the_queue_to_its_end() -> None:
    bench = Bench(max_running=1)
    shown = SchedulerTables()
    assert shown.tables().requests_total == 0, "there is no scheduler yet"
    shown.scheduler = bench.scheduler
    bench.send("a", list(range(3 * PAGE)), 6, priority=2)
    bench.send("b", [90, 91, 92], 2)
    bench.turn()
    bench.turn()
    a, b = shown.tables().scheduled
    assert (a.rid, a.phase, a.prompt_tokens, a.priority) == ("a", "decode", 3 * PAGE, 2)
    assert a.pages >= 3 and a.output_tokens >= 1
    assert (b.rid, b.phase, b.pages, b.output_tokens) == ("b", "waiting", 0, 0)
    bench.run()
    assert shown.tables().scheduled == []
    bench.close()


def test_the_biggest_prefixes_are_named_without_their_tokens() -> None:
    bench = Bench()
    shown = SchedulerTables()
    shown.scheduler = bench.scheduler
    head = list(range(4 * PAGE))
    for rid, tail in (("a", 40), ("b", 60)):
        bench.send(rid, [*head, *range(tail, tail + 2 * PAGE)], 1)
        bench.run()
    tables = shown.tables()
    first = tables.prefixes[0]
    assert tables.prefixes_total == 3
    assert (first.start, first.tokens, first.pages, first.below, first.users) == (0, 4 * PAGE, 4, 4, 0)
    assert first.hits >= 2 and len({prefix.name for prefix in tables.prefixes}) == 3
    assert [prefix.start for prefix in tables.prefixes[1:]] == [4 * PAGE] * 2
    assert shown.tables().prefixes is tables.prefixes, "a tree that nobody has used since is not walked again"
    bench.close()
