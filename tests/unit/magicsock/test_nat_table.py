"""Which pairs of NAT classes find a direct path."""

from itertools import combinations_with_replacement

import pytest

from harness.natsim import Lab

DIRECT = {"PP", "PA", "PE", "PH", "PX", "AA", "AE", "AH", "AX", "EE", "XX"}


@pytest.mark.parametrize("pair", ["".join(p) for p in combinations_with_replacement("PAEHXB", 2)])
def test_pair(pair):
    for order in {pair, pair[::-1]}:
        lab = Lab()
        a, b = lab.add(order[0]), lab.add(order[1])
        lab.introduce()
        lab.talk(a, b, 20)
        expected = pair in DIRECT
        assert (lab.is_direct(a, b), lab.is_direct(b, a)) == (expected, expected), order
        assert len(a.received) >= 20 and len(b.received) >= 20
        if expected:
            relayed, direct = lab.relayed, lab.direct
            lab.talk(a, b, 30)
            assert lab.relayed == relayed and lab.direct == direct + 60
