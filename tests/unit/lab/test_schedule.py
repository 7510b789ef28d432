"""What the overlap benchmark compares with: ideals, and placements of the paper, against figures worked out by hand."""

from schedule.ideal import UnitShape


def test_ideal_and_bound():
    shape = UnitShape(4, 4, 4, update_s=1.0, h2d_bytes_per_s=2.0, d2h_bytes_per_s=4.0)
    step = shape.step(num_units=10, num_slots=3, forward_s=5.0, backward_s=15.0)
    # to the device 10 weights, 7 once more, and 9 inputs; from it 10 inputs and 10 gradients; 10 updates
    assert step.serial_s() == 20 + 2 * 26 + 20 + 10
    assert step.ideal_s() == 2 * 26 + 2 + 1 + 1
    assert step.bound_s() == (20 + 0.5) + (2 * 16 + 1.5 + 1 + 1)
    slow = shape.step(num_units=10, num_slots=3, forward_s=100.0, backward_s=300.0)
    writing = UnitShape(4, 40, 4, update_s=1.0, h2d_bytes_per_s=20.0, d2h_bytes_per_s=4.0)
    assert writing.step(10, 3, 5.0, 15.0).bound_s() == (90 + 0.5) + (9 * 2 + 7 * 0.2 + 1.5 + 1 + 1)
    assert slow.ideal_s() == 400 + 2 + 1 + 1 == slow.bound_s()
