import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.config import DecodeConfig, PrefillConfig, RouterConfig, load_config
from pdserve.cluster.fault_spec import STEPS_OF, Act, Countdown, Fault, parse
from pdserve.core.errors import ConfigError


def load(config_class, **flags):
    return load_config(config_class, flags, environ={}).config


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@send:Have#3", Fault(Act.KILL, "send:Have", None, 3)),
        (" freeze@copy ", Fault(Act.FREEZE, "copy")),
        ("freeze=1.5@stepped", Fault(Act.FREEZE, "stepped", 1.5)),
        ("cut@receive:Want#2", Fault(Act.CUT, "receive:Want", None, 2)),
        ("slow=0.05@send:Blocks", Fault(Act.SLOW, "send:Blocks", 0.05)),
        ("corrupt@receive:Blocks", Fault(Act.CORRUPT, "receive:Blocks")),
    ],
)
def test_a_fault_is_read_and_written(text, fault):
    assert parse(text) == fault
    assert parse(str(fault)) == fault


@given(st.text(alphabet="kilcutslowfreze@:#=.0123456789,Hav sendcopy"))
def test_any_text_is_a_fault_or_refused(text):
    with contextlib.suppress(ValueError):
        assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize("act", list(Act))
def test_an_act_is_read_at_each_of_its_steps(act):
    seconds = "=1" if act is Act.SLOW else ""
    assert {parse(f"{act}{seconds}@{step}").step for step in STEPS_OF[act]} == STEPS_OF[act]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds '', which is not of the form ACTION"),
        ("kill", r"holds 'kill', which is not of the form ACTION"),
        ("kill@send:Have,", r"holds '', which is not of the form"),
        ("maim@copy", r"the action 'maim', which is not one of kill, freeze, cut, slow, corrupt"),
        ("kill@send:Hve", r"the step 'send:Hve': it is step, stepped, copy, copied, or send"),
        ("cut@copy", r"holds cut@copy, but cut has no meaning at that step"),
        ("slow=1@receive:Have", r"slow has no meaning at that step"),
        ("corrupt@send:Want", r"corrupt has no meaning at that step"),
        ("slow@send:Have", r"seconds belong to slow"),
        ("kill=1@send:Have", r"seconds belong to slow"),
        ("kill@send:Have#0", r"occurrences are counted from 1"),
    ],
)
def test_a_bad_fault_is_refused_naming_what_is_wrong_with_it(text, message):
    with pytest.raises(ConfigError, match="--fault: .*" + message):
        load(PrefillConfig, enable_faults="on", fault=text)


@pytest.mark.parametrize("config_class", [PrefillConfig, DecodeConfig])
def test_a_node_refuses_faults_that_it_was_not_enabled_for(config_class):
    with pytest.raises(ConfigError, match=r"--fault: 'kill@step#1,cut@send:Have#2' .* only with --enable-faults on"):
        load(config_class, fault="kill@step,cut@send:Have#2")
    faults = load(config_class, fault="kill@step,cut@send:Have#2", enable_faults="on").trials.fault
    assert faults == (Fault(Act.KILL, "step"), Fault(Act.CUT, "send:Have", None, 2))


def test_a_router_has_no_faults():
    assert not hasattr(RouterConfig(), "trials")


def test_a_fault_strikes_once_at_its_occurrence_and_only_at_its_step():
    first, third, other = parse("kill@copy"), parse("freeze@copy#3"), parse("cut@send:Have")
    countdown = Countdown([third, first, other])
    assert [countdown.reach("copy") for _ in range(4)] == [[first], [], [third], []]
    assert countdown.reach("copied") == []
    assert [countdown.reach("send:Have") for _ in range(2)] == [[other], []]


def test_faults_of_one_moment_strike_in_the_order_they_were_given():
    faults = [parse("slow=1@send:Blocks#2"), parse("corrupt@send:Blocks#2")]
    countdown = Countdown(faults)
    assert [countdown.reach("send:Blocks") for _ in range(2)] == [[], faults]
