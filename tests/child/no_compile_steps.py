"""What tests/test_debug.py looks at, for versions of PyTorch that have no pytest beside them: it fails where something differs."""

import torch

from memplan.debug import no_compile

ONE = torch.ones(())


def off_by_a_thousand(graph, _inputs):
    """A backend whose results tell that they are compiled."""
    return lambda *inputs: tuple(each + 1000 for each in graph(*inputs))


def compiled(function):
    return torch.compile(function, backend=off_by_a_thousand)


def double(x):
    return 2 * x


def with_a_break(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


class Tripled(torch.nn.Module):
    def forward(self, x):
        return x * 3


@no_compile()
def eager(x):
    return compiled(double)(x) + 1


def main():
    """Compiled before and inside, with a break, as a module, and used in what is compiled."""
    before = compiled(double)
    assert before(ONE) == 1002
    with no_compile():
        broken, module = compiled(with_a_break), compiled(Tripled())
        assert (before(ONE), broken(ONE), module(ONE)) == (2, 4, 3)
    assert (before(ONE), module(ONE)) == (1002, 1003)
    assert broken(ONE) > 1000
    with no_compile(), no_compile():
        assert (before(ONE), broken(ONE), module(ONE)) == (2, 4, 3)
    assert compiled(lambda x: eager(x) * 2)(ONE) == 1006


if __name__ == "__main__":
    main()
    torch.ones(1, device="cuda")  # a program of which nothing is seen has no verdict
