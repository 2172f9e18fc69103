from __future__ import annotations

import pytest

from pipeline.timeline import DeviceSpan, HostSpan, Timeline


def timeline(*computes: tuple[float, float]) -> Timeline:
    device = [DeviceSpan("compute", n, n % 2, begin, end) for n, (begin, end) in enumerate(computes)]
    # Copies overlap with other steps' computing and are nobody's busy time.
    device += [DeviceSpan("D2H", 0, 0, 1.0, 9.0)]
    return Timeline("async", True, [HostSpan("wait", 0, 0.0, 9.0)], device[::-1])


def test_steps_and_the_gaps_between_them_make_the_share():
    recorded = timeline((1.0, 1.9), (2.0, 2.8), (3.0, 99.0))
    assert [span.step for span in recorded.compute] == [0, 1, 2]
    # The last step's end is no measure: nothing tells how long the device waited after it.
    assert recorded.busy_share == pytest.approx((0.9 + 0.8) / 2)
    assert recorded.step_seconds == pytest.approx(1.0)


@pytest.mark.parametrize("computes", [(), ((1.0, 2.0),)])
def test_one_step_says_nothing_about_gaps(computes):
    assert timeline(*computes).busy_share is None and timeline(*computes).step_seconds is None
