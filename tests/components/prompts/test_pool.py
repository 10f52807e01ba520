import errno
from pathlib import Path

import pytest

from components.prompts.pool import Pool, disk_errors


def test_a_full_disk_is_the_operating_systems_error(tmp_path: Path):
    pool = Pool(tmp_path)
    pool._run("PRAGMA max_page_count = 16")  # SQLite's own way to be full
    with pytest.raises(OSError, match="full") as caught, disk_errors():
        pool.lacks(f"{number:0100}" for number in range(10_000))
    assert caught.value.errno == errno.ENOSPC
