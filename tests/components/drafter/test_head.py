import pytest
import torch
from speculators.losses import dpace_loss_decay
from torch.nn.functional import cross_entropy, kl_div

from components.drafter import head
from components.drafter.loss import d_pace

ROWS, WIDTH, VOCABULARY = 37, 16, 50


@pytest.fixture
def tensors(monkeypatch):
    monkeypatch.setattr(head, "LOGITS_AT_A_TIME", 8 * VOCABULARY)
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(20, WIDTH)
    return hidden, weight, target, torch.rand(ROWS)


def assert_equal(ours, theirs, upstream, hidden):
    """The losses, and the gradient of their weighted sum."""
    torch.testing.assert_close(ours, theirs.float())
    gradients = [torch.autograd.grad((one * upstream).sum(), hidden)[0] for one in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_chunked_cross_entropy_is_the_library_s_with_its_gradient(tensors):
    hidden, weight, _, upstream = tensors
    hidden.requires_grad_()
    ids = torch.randint(VOCABULARY, (ROWS,))
    theirs = cross_entropy((hidden @ weight.T).double(), ids, reduction="none")
    assert_equal(head.cross_entropy(hidden, weight, ids), theirs, upstream, hidden)


def test_chunked_divergence_is_the_library_s_with_its_gradient(tensors):
    hidden, weight, target, upstream = tensors
    hidden.requires_grad_()
    places = torch.randint(20, (ROWS,))
    wanted = (target @ weight.T).double().log_softmax(-1)[places]
    given = (hidden @ weight.T).double().log_softmax(-1)
    theirs = kl_div(given, wanted, reduction="none", log_target=True).sum(-1)
    assert_equal(head.divergence(hidden, weight, target, places), theirs, upstream, hidden)


def test_d_pace_weights_are_the_library_s():
    torch.manual_seed(0)
    loss, inside = torch.rand(1, 6 * 5) * 4, torch.rand(6, 5) < 0.7
    inside[0] = True
    theirs = dpace_loss_decay(None, inside.flatten()[None], 5, 0.5, loss)
    ours = d_pace(torch.exp(-loss.view(6, 5)), inside)
    torch.testing.assert_close(ours, theirs.view(6, 5))
