"""What becomes of a run one of whose processes fails."""

import pytest

from components.contract.errors import UserError
from components.training.parallel import Ranks, started


def refuse(ranks: Ranks) -> None:
    if ranks.rank:
        raise UserError("this machine has no room")
    ranks.meet()


@pytest.mark.slow
def test_what_another_rank_wants_changed_is_said_and_not_tried_again(tmp_path, capfd):
    with pytest.raises(UserError, match="named what must be changed"), started(2, tmp_path, refuse) as ranks:
        refuse(ranks)
    said = capfd.readouterr().err
    assert "training failed: process 1: this machine has no room\n" in said
    assert "Traceback" not in said
