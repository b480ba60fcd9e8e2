"""The line for blocks: who is tried first, and who may pass."""

from pdserve.core.admission import MAX_PASSES, AdmissionLine


def make_line(*keys: int, resumed: tuple[int, ...] = ()) -> AdmissionLine:
    line = AdmissionLine()
    for key in keys:
        line.join(key, 0, resumed=False)
    for key in resumed:
        line.join(key, 0, resumed=True)
    return line


def test_first_come_first_served():
    assert make_line(3, 1, 2).admit(lambda _: True) == [3, 1, 2]


def test_a_higher_priority_goes_first():
    line = make_line(1)
    line.join(2, 5, resumed=False)
    assert line.admit(lambda _: True) == [2, 1]


def test_the_resumed_come_before_all_others_the_oldest_first():
    assert make_line(1, resumed=(9, 4)).admit(lambda _: True) == [4, 9, 1]


def test_joining_twice_keeps_the_place():
    line = make_line(1, 2, 1)
    assert len(line) == 2
    assert line.admit(lambda _: True) == [1, 2]


def test_who_left_is_not_tried():
    line = make_line(1, 2)
    line.leave(1)
    line.leave(7)
    assert line.admit(lambda _: True) == [2]
    assert 2 not in line


def test_a_head_that_does_not_fit_is_passed_only_so_often():
    line = make_line(0, *range(1, 20))
    assert line.admit(lambda key: key != 0) == list(range(1, MAX_PASSES + 1))
    assert line.admit(lambda key: key != 0) == []
    assert line.admit(lambda _: True)[0] == 0


def test_nobody_new_passes_a_resumed_one_that_does_not_fit():
    line = make_line(1, resumed=(5,))
    assert line.admit(lambda key: key == 1) == []


def test_a_long_line_that_does_not_fit_costs_a_few_tries():
    tried = []
    line = make_line(*range(1000))
    assert line.admit(lambda key: bool(tried.append(key))) == []
    assert tried == list(range(MAX_PASSES))


def test_who_has_blocks_out_of_turn_has_passed_all_before_it_and_none_of_them_too_often():
    line = make_line(0, *range(1, 20), resumed=(50,))
    for key in range(1, MAX_PASSES + 1):
        assert line.may_pass(key)
        line.pass_all(key)
        assert key not in line
    assert not line.may_pass(MAX_PASSES + 1)
    assert line.may_pass(50)


def test_higher_priorities_come_before_lower_ones_that_are_resumed():
    line = make_line(1, resumed=(2,))
    line.join(3, 1, resumed=False)
    line.join(4, 1, resumed=True)
    assert line.admit(lambda _: True) == [4, 3, 2, 1]


class Counted(int):
    """A key that counts how often it is looked at to find its place."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < int(other)

    def __gt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) > int(other)


def test_to_join_and_to_leave_a_line_of_ten_thousand_takes_a_few_looks():
    line = AdmissionLine()
    for key in range(0, 20_000, 2):
        line.join(key, 0, resumed=True)
    middle = Counted(10_001)
    line.join(middle, 0, resumed=True)
    assert middle in line
    line.leave(middle)
    assert 0 < Counted.num_compared < 4 * 15
    assert middle not in line
    assert len(line) == 10_000
