"""Which process a recorded pid means: pids are recycled, start times tell them apart."""


def start_time(pid: int) -> str | None:
    """Return the start time of a live process in clock ticks since boot (``/proc/<pid>/stat``), else None."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
