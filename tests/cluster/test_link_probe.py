"""The speed of a link: what is asked, what counts, and what is asked again."""

from pdserve.cluster.link_probe import AGAIN_S, MAX_ANSWERS, LinkProbe
from pdserve.cluster.messages import MAX_PROBE_BYTES, Probe

SIZE = 4_000_000


def test_the_fastest_of_a_few_answers_is_the_speed():
    probe = LinkProbe()
    assert probe.tick(0.0) == [Probe(0, MAX_PROBE_BYTES)]
    now = 0.0
    took = [0.0625, 0.03125, 0.015625, 0.046875]
    for seq, took_s in enumerate(took):
        assert not probe.is_done
        now += took_s
        probe.answered(seq, SIZE, now)
    assert probe.is_done
    assert probe.bytes_per_s == SIZE / min(took)
    assert len(took) == MAX_ANSWERS


def test_a_slow_link_is_asked_once():
    probe = LinkProbe()
    probe.tick(0.0)
    assert probe.answered(0, SIZE, 1.0) == []
    assert probe.is_done
    assert probe.bytes_per_s == SIZE


def test_a_lost_answer_is_asked_for_again_and_not_before_it_could_have_come():
    probe = LinkProbe()
    probe.tick(0.0)
    assert probe.tick(AGAIN_S - 0.1) == []
    assert probe.tick(AGAIN_S) == [Probe(1, MAX_PROBE_BYTES)]


def test_an_answer_that_comes_after_the_second_question_is_not_taken_for_its_answer():
    probe = LinkProbe()
    probe.tick(0.0)
    probe.tick(AGAIN_S)
    probe.answered(0, SIZE, AGAIN_S + 0.001)
    assert probe.bytes_per_s == SIZE / (AGAIN_S + 0.001)


def test_an_answer_to_no_question_counts_for_nothing():
    probe = LinkProbe()
    assert probe.answered(0, SIZE, 0.0) == []
    probe.tick(0.0)
    assert probe.answered(7, SIZE, 0.1) == []
    assert probe.bytes_per_s == 0.0
