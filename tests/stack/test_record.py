"""The tables of what stands on MPI say what the records say."""

from tests.stack import record

FOUND = record.records()


def test_the_pages_show_the_records() -> None:
    assert record.in_summary() == record.for_summary(FOUND), "run: python -m tests.stack.record --write"
    assert record.DETAILS.read_text() == record.for_docs(FOUND), "run: python -m tests.stack.record --write"


def test_nothing_on_record_fails() -> None:
    failed = [
        (r["torch"], r["mpi"], r["ranks"], line)
        for r in FOUND
        for lines in r["sections"].values()
        for line, said in lines.items()
        if said == record.FAILED
    ]
    assert not failed
