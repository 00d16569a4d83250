"""Compressed JSON of jobs.db can be read again, also by later versions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.events import at
from steward.core.records import JobRecord
from steward.jobs.compression import compress_json, decompress_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


@given(st.dictionaries(st.text(), JSON) | st.lists(JSON), st.booleans(), st.integers(1, 300))
def test_json_is_read_as_it_was_written(value: object, is_final: bool, times: int) -> None:
    data = msgspec.json.encode([value] * times)
    stored = compress_json(data, is_final=is_final)
    assert decompress_json(stored) == data
    assert decompress_json(data) == data


def test_a_stored_row_stays_readable() -> None:
    stored = bytes.fromhex("58a4a0a3ff634364047378c24f4c49c49a686b0141160d94")
    assert decompress_json(stored) == b'{"job_id":7,"user":"ada","state":"COMPLETED"}'


@pytest.mark.parametrize("is_final", [True, False])
def test_a_record_takes_a_third_of_its_json(is_final: bool) -> None:
    job = JobRecord(
        job_id=7,
        name="relax",
        uid=1000,
        user="ada",
        account="physics",
        partition="main",
        state="FAILED",
        submit_line="sbatch -n 16 relax.sh",
        work_dir="/scratch/ada/relax",
        stdout="/scratch/ada/relax/slurm-7.out",
        stderr="/scratch/ada/relax/slurm-7.out",
        tres_allocated="cpu=16,mem=64G,node=1,billing=16",
        submit=at(0),
        start=at(60),
        end=at(3600),
        nodelist="n1",
        nodes=1,
        cpus=16,
    )
    data = msgspec.json.encode(job)
    assert len(compress_json(data, is_final=is_final)) * 3 < len(data) + 30
