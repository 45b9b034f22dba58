"""Records: they survive kills, full disks and files of other programs."""

from __future__ import annotations

import gzip
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dutyfree.contract.errors import RecordsError
from dutyfree.study import records
from dutyfree.study.records import SCHEMA, ActionRecord, RecordsWriter, Session, Study, Trial, TrialFailure


def study(**changes):
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "version": "0",
        "started": "now",
        "plan": {"name": "p"},
        "host": {"host_key": "k"},
    }
    return Study(**(fields | changes))


def trial(index, **changes):
    fields: dict[str, Any] = {
        "id": f"T0/bare/x1/trial-{index}",
        "workload": "T0",
        "substrate": "bare",
        "index": index,
        "started": "now",
        "load": 0.0,
        "total": 1.0,
        "first": ActionRecord("first", "ready", 0.5, inside=0.25),
    }
    return Trial(**(fields | changes))


def written(directory, *lines):
    writer = RecordsWriter(directory)
    writer.write(*lines)
    writer.close()
    return directory / records.FILE


def test_what_is_written_is_read(tmp_path):
    failed = trial(2, failure=TrialFailure("infrastructure", "create", "no space"))
    written(tmp_path, study(), Session("now", 0.5), trial(1), failed, trial(3, warmup=True))
    found = records.read(tmp_path)
    assert found.study == study()
    assert found.sessions == (Session("now", 0.5),)
    assert found.trials == (trial(1), failed, trial(3, warmup=True))
    assert [one.index for one in found.measured] == [1, 2]


def test_a_compressed_file_reads_as_the_plain_one(tmp_path):
    plain = written(tmp_path, study(), Session("now", 0.5), trial(1))
    wanted = records.read(tmp_path)
    packed = tmp_path / "elsewhere" / "any-name.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert records.read(packed) == records.read(plain) == wanted
    assert records.home(packed) == packed.parent
    packed.rename(packed.with_name(records.COMPRESSED))
    assert records.read(packed.parent) == wanted
    assert records.home(packed.parent) == packed.parent


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:2],
        lambda data: data[:20] + bytes(20) + data[40:],
        lambda data: data[:-6] + bytes(6),
    ],
    ids=["cut", "a beginning", "overwritten", "a wrong checksum"],
)
def test_a_damaged_compressed_file_is_told(tmp_path, damage):
    plain = written(tmp_path, study(), *(trial(index) for index in range(50)))
    (tmp_path / records.COMPRESSED).write_bytes(damage(gzip.compress(plain.read_bytes())))
    plain.unlink()
    with pytest.raises(
        RecordsError, match=r"records\.jsonl\.gz is a damaged gzip file: .*copy the file again"
    ):
        records.read(tmp_path)


def test_a_compressed_study_is_not_written_to(tmp_path):
    plain = written(tmp_path, study(), trial(1))
    packed = gzip.compress(plain.read_bytes())
    (tmp_path / records.COMPRESSED).write_bytes(packed)
    plain.unlink()
    assert records.exists(tmp_path)
    with pytest.raises(RecordsError, match=r"are compressed.*gunzip .*records\.jsonl\.gz"):
        RecordsWriter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [records.COMPRESSED]


def test_nothing_to_read_is_told(tmp_path):
    with pytest.raises(RecordsError, match=f"no records in {tmp_path}"):
        records.read(tmp_path)
    with pytest.raises(RecordsError, match=r"there is no .*absent\.gz.*or a file of records"):
        records.read(tmp_path / "absent.gz")


@pytest.mark.parametrize("lost", [1, 5, 40])
def test_a_torn_last_line_is_passed_over_and_then_cut_off(tmp_path, lost):
    path = written(tmp_path, study(), trial(1), trial(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    assert [one.index for one in records.read(tmp_path).trials] == [1]
    writer = RecordsWriter(tmp_path)
    writer.write(trial(3))
    writer.close()
    assert [one.index for one in records.read(tmp_path).trials] == [1, 3]


def test_two_studies_cannot_write_at_once(tmp_path):
    writer = RecordsWriter(tmp_path)
    with pytest.raises(RecordsError, match="another study is writing"):
        RecordsWriter(tmp_path)
    writer.close()
    RecordsWriter(tmp_path).close()


def test_a_full_disk_keeps_what_was_written(tmp_path):
    path = written(tmp_path, study(), trial(1))
    writer = RecordsWriter(tmp_path)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(RecordsError, match=r"cannot append.*--resume"):
            writer.write(trial(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.stat().st_size == size
    writer.write(trial(3))
    writer.close()
    assert [one.index for one in records.read(tmp_path).trials] == [1, 3]


def test_no_records_is_said_with_a_remedy(tmp_path):
    with pytest.raises(RecordsError, match=r"no records in .*--out"):
        records.read(tmp_path)


def test_an_unwritable_directory_is_said_with_a_remedy():
    with pytest.raises(RecordsError, match=r"cannot write to /proc/nowhere.*--out"):
        RecordsWriter(Path("/proc/nowhere"))


def test_damage_in_the_middle_names_the_line(tmp_path):
    path = written(tmp_path, study(), trial(1), trial(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(RecordsError, match=r"records.jsonl:2: not a dutyfree record"):
        records.read(tmp_path)


def test_a_newer_schema_is_refused(tmp_path):
    written(tmp_path, study(schema=SCHEMA + 1))
    with pytest.raises(RecordsError, match="schema"):
        records.read(tmp_path)


def test_records_without_a_beginning_are_refused(tmp_path):
    written(tmp_path, trial(1))
    with pytest.raises(RecordsError, match="does not start with a study line"):
        records.read(tmp_path)


def test_lines_are_plain_json_that_others_can_read(tmp_path):
    path = written(tmp_path, study(), trial(1))
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [line["type"] for line in lines] == ["study", "trial"]
    assert lines[1]["first"]["inside"] == 0.25
