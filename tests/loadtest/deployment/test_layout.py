import pytest

from pdserve.loadtest.deployment.layout import Layout, layouts, parse_ratios
from pdserve.loadtest.errors import OptionError


def names(*args):
    return [layout.name for layout in layouts(*args)]


def test_two_cores_have_two_colocated_layouts_and_one_split():
    assert names(2) == ["2 both", "1 both, 2 threads", "1P1D"]


def test_every_ratio_that_fits_is_tried():
    assert names(4)[2:] == ["1P3D", "2P2D", "3P1D"]


def test_of_many_ratios_five_are_tried_from_end_to_end():
    assert names(17)[2:] == ["1P16D", "5P12D", "8P9D", "12P5D", "16P1D"]


def test_ratios_may_be_chosen():
    assert names(4, parse_ratios("1:3, 2:2"))[2:] == ["1P3D", "2P2D"]


@pytest.mark.parametrize("text", ["1", "1:2:3", "a:b", "", "1:-1"])
def test_ratios_that_are_none_are_refused(text):
    with pytest.raises(OptionError, match="--ratios"):
        parse_ratios(text)


def test_ratios_that_do_not_fill_the_cores_are_refused_with_both_numbers():
    with pytest.raises(OptionError, match=r"--ratios 1:1: needs 4 nodes"):
        layouts(4, ((1, 1),))


def test_one_core_cannot_be_split():
    with pytest.raises(OptionError, match="--cores 1"):
        layouts(1)


def test_the_command_line_names_the_nodes_the_port_and_what_else_was_asked_for():
    command = Layout(1, 3, 4).up_command("http://127.0.0.1:81", ("--model", "m"))
    assert command[3:] == ("up", "--port", "81", "--prefill", "1", "--decode", "3", "--model", "m")
    assert Layout(0, 2, 2).up_command("http://127.0.0.1:81", ())[-4:] == ("--role-mode", "both", "--decode", "2")
