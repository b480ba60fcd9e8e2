"""Which nodes a request goes to."""

import math
from dataclasses import replace

from pdserve.cluster.messages import Capacity, Gauges, Link, Peer, Role
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.ids import BlockHash, Epoch, NodeId, RequestId, new_request_id
from pdserve.core.sampling import SamplingParams
from pdserve.router.ledger import Times
from pdserve.router.placement import Limits, Node, Place, pick
from pdserve.router.record import Plan, Record, SampleRecord

BLOCK = 4
TOKEN_BYTES = 64


def make_node(
    name: str,
    role: Role,
    token_s: float | None = 0.001,
    *,
    prompts: tuple[int, ...] = (),
    num_streams: int = 0,
    num_blocks: int = 100,
    links: tuple[str, ...] = (),
    doubted: tuple[str, ...] = (),
    max_running: int = 16,
    starts_no_prompt: bool = False,
    cached: tuple[BlockHash, ...] = (),
    num_free: int | None = None,
    bytes_per_s: float = 0.0,
    least_tokens: int = 0,
) -> Node:
    """token_s None: it has not had its first beat. prompts: lengths of those it was given; a stream takes a block.

    num_free: blocks that nobody holds, all by default. bytes_per_s: of its links
    """
    num_free = num_blocks if num_free is None else num_free
    gauges = None if token_s is None else Gauges(num_free, 0, 0, 0, 0, 0, 0, 0, 0, 0, token_s, starts_no_prompt)
    node = Node(
        NodeId(name),
        role,
        Peer(NodeId(name), Epoch(1, 1), f"mem://{name}"),
        Capacity(num_blocks, BLOCK, 4096, max_running, TOKEN_BYTES, least_tokens),
        links={NodeId(link): Link(NodeId(link), bytes_per_s=bytes_per_s) for link in links},
        doubted={NodeId(node) for node in doubted},
        gauges=gauges,
        prompts={new_request_id(): length for length in prompts},
        streams={RequestId(bytes([i]) * 16): BLOCK - 1 for i in range(num_streams)},
    )
    node.cache.apply(CacheDelta(0, 0, 1, cached, ()))
    return node


def prefill(name: str, token_s: float | None = 0.001, **options: object) -> Node:
    return make_node(name, Role.PREFILL, token_s, **options)  # type: ignore[arg-type]


def decode(name: str, token_s: float | None = 0.001, **options: object) -> Node:
    """A decode node that is linked to P0 and P1 unless told otherwise."""
    options.setdefault("links", ("P0", "P1"))
    return make_node(name, Role.DECODE, token_s, **options)  # type: ignore[arg-type]


def make_record(num_tokens: int = 40, max_tokens: int = 8, num_outputs: int = 0) -> Record:
    params = SamplingParams(max_tokens=max_tokens)
    record = Record(new_request_id(), "r", list(range(num_tokens)), params, Times(0.0))
    record.samples[0].outputs = list(range(num_outputs))
    return record


def names_of(record: Record) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(bytes([i]) * 16) for i in range(-(-record.num_tokens // BLOCK)))


# The names of the ten blocks of make_record().
HASHES = names_of(make_record())


def picked(
    *nodes: Node, record: Record | None = None, max_prompts: float = 8, cooperative: bool = True
) -> tuple[str | None, str | None] | None:
    """Names of the prefill and the decode node."""
    record = record or make_record()
    place = pick(record, names_of(record), nodes, max_prompts, cooperative)
    if place is None:
        return None
    return place.prefill and place.prefill.node, place.decode and place.decode.node


# ---- what a place is -------------------------------------------------------------------------------


def test_a_place_names_its_plan_and_the_node_that_computes_the_prompt():
    p0, d0 = prefill("P0"), decode("D0")
    assert (Place(p0, d0).plan, Place(p0, d0).computing) == (Plan.SPLIT, p0)
    assert (Place(p0, None).plan, Place(p0, None).computing) == (Plan.PREFILL_ONLY, p0)
    assert (Place(None, d0).plan, Place(None, d0).computing) == (Plan.LOCAL, d0)


def test_no_node_is_no_place():
    assert picked() is None
    assert picked(prefill("P0")) is None


# ---- where the first token comes soonest -----------------------------------------------------------


def test_the_prompt_goes_where_less_is_to_be_computed_before_it_has_been():
    nodes = prefill("P0", prompts=(200,)), prefill("P1", prompts=(30, 30)), decode("D0", max_running=0)
    assert picked(*nodes) == ("P1", "D0")


def test_a_faster_node_with_a_longer_line_is_chosen_when_it_is_through_sooner():
    p0, p1 = prefill("P0", token_s=0.004), prefill("P1", token_s=0.001, prompts=(100,))
    assert picked(p0, p1, decode("D0", max_running=0)) == ("P1", "D0")
    assert picked(p0, p1, decode("D0", max_running=0), record=make_record(30)) == ("P0", "D0")


def test_a_decode_node_computes_the_prompt_when_the_line_elsewhere_takes_longer():
    p0 = prefill("P0", token_s=0.001, prompts=(150,))
    assert picked(p0, decode("D0", token_s=0.003)) == (None, "D0")
    assert picked(p0, decode("D0", token_s=0.005)) == ("P0", "D0")


def test_a_decode_node_that_gives_each_request_the_longest_ones_blocks_has_room_for_fewer():
    p0, at_once = prefill("P0", token_s=0.001, prompts=(150,)), {"num_blocks": 30, "least_tokens": 80}
    one, two = (decode("D0", num_streams=num_streams, **at_once) for num_streams in (0, 1))
    for node in (one, two):
        node.streams = dict.fromkeys(node.streams, node.most_tokens(make_record()))
    assert picked(p0, one) == (None, "D0")
    assert picked(p0, two) == ("P0", "D0")
    assert picked(p0, decode("D0", num_blocks=30, num_streams=1)) == (None, "D0")


def test_samples_that_each_take_the_longest_ones_blocks_at_once_fit_fewer_nodes():
    many = replace(make_record(), samples=[SampleRecord(index) for index in range(3)])
    assert decode("D0").can_begin(many)
    # Ten blocks that all share, and 30 of 40 for each.
    assert decode("D0", least_tokens=160).can_begin(many)
    assert not decode("D0", least_tokens=164).can_begin(many)


def test_a_line_at_the_decode_node_counts_as_well():
    p0 = prefill("P0", prompts=(150,))
    assert picked(p0, decode("D0", prompts=(149,))) == (None, "D0")
    assert picked(p0, decode("D0", prompts=(151,))) == ("P0", "D0")


def test_of_two_decode_nodes_the_one_that_is_through_sooner_computes_it():
    p0 = prefill("P0", prompts=(500,))
    assert picked(p0, decode("D0", token_s=0.002), decode("D1", token_s=0.001)) == (None, "D1")


def test_equally_soon_a_decode_node_is_left_to_its_streams():
    assert picked(decode("A0", links=("P0",)), prefill("P0")) == ("P0", "A0")
    assert picked(prefill("P0", prompts=(60,)), decode("A0", prompts=(60,), links=("P0",))) == ("P0", "A0")


def test_equally_soon_the_decode_node_with_fewer_streams_gets_it():
    nodes = prefill("P0"), decode("D0", num_streams=3), decode("D1", num_streams=2), decode("D2", num_streams=4)
    assert picked(*nodes) == ("P0", "D1")


def test_of_prefill_nodes_that_nothing_else_tells_apart_the_first_by_name_is_chosen():
    nodes = [prefill("P0"), prefill("P1"), decode("D0")]
    assert picked(*nodes) == picked(*reversed(nodes)) == ("P0", "D0")


def test_before_their_first_beat_nodes_are_told_apart_by_their_lines():
    nodes = prefill("P0", None, prompts=(20,)), prefill("P1", None), decode("D0", None)
    assert picked(*nodes) == ("P1", "D0")


# ---- what a decode node has room for ---------------------------------------------------------------


def test_room_is_what_the_streams_leave_when_each_has_grown_to_its_end():
    node = decode("D0")
    node.streams = {new_request_id(): 3 * BLOCK, new_request_id(): BLOCK + 1}
    assert node.room == (100 - 3 - 2) * BLOCK


def test_a_node_has_no_room_before_its_first_beat_or_with_all_the_streams_it_may_run():
    assert decode("D0", None).room == 0
    assert decode("D0", num_streams=3, max_running=3).room == 0
    assert decode("D0", num_streams=2, max_running=3).room > 0


def test_a_decode_node_computes_only_what_it_has_room_for_to_the_last_token():
    """40 + 9 - 1 tokens are 12 blocks: the last token drawn needs no slot."""
    record, p0 = make_record(40, max_tokens=9), prefill("P0", prompts=(1000,))
    assert picked(p0, decode("D0", num_streams=2, num_blocks=14), record=record) == (None, "D0")
    assert picked(p0, decode("D0", num_streams=2, num_blocks=13), record=record) == ("P0", "D0")


def test_outputs_so_far_are_part_of_what_there_must_be_room_for_and_not_counted_twice():
    record, p0 = make_record(40, max_tokens=9, num_outputs=5), prefill("P0", prompts=(1000,))
    assert picked(p0, decode("D0", num_streams=2, num_blocks=14), record=record) == (None, "D0")


def test_a_full_decode_node_is_still_given_streams_to_wait_for_their_blocks():
    assert picked(prefill("P0"), decode("D0", max_running=0)) == ("P0", "D0")


def test_a_request_longer_than_a_decode_node_can_ever_hold_goes_past_it():
    record = make_record(40, max_tokens=9)
    assert picked(prefill("P0"), decode("D0", num_blocks=11), record=record) is None
    assert picked(prefill("P0"), decode("D0", num_blocks=11), decode("D1"), record=record) == ("P0", "D1")


# ---- how many prompts a node is given --------------------------------------------------------------


def test_a_prefill_node_with_all_the_prompts_it_may_have_is_passed_over():
    nodes = prefill("P0", token_s=0.0001, prompts=(1, 1)), prefill("P1", prompts=(50,)), decode("D0", max_running=0)
    assert picked(*nodes, max_prompts=2) == ("P1", "D0")
    assert picked(*nodes, max_prompts=3) == ("P0", "D0")
    assert picked(*nodes, max_prompts=1) is None


def test_a_node_with_a_second_of_work_before_it_is_given_no_prompt_unless_it_is_idle():
    busy, idle = prefill("P0", prompts=(600, 500)), prefill("P0", token_s=9.0)
    assert busy.takes(40, Limits(max_work_s=1.2))
    assert not busy.takes(40, Limits(max_work_s=1.0))
    assert idle.takes(4000, Limits(max_work_s=0.0))


def test_a_node_that_computes_short_prompts_first_has_before_them_only_what_is_not_longer():
    node = prefill("P0", prompts=(30_000, 600, 500))
    assert not node.takes(40, Limits())
    node.is_fcfs = False
    assert node.takes(40, Limits())
    assert node.takes(500, Limits())
    assert not node.takes(600, Limits())
    assert not node.takes(40, Limits(max_prompts=3))


def test_when_all_prefill_nodes_have_their_prompts_a_decode_node_computes_up_to_as_many():
    p0 = prefill("P0", prompts=(1, 1))
    assert picked(p0, decode("D0", token_s=1.0, prompts=(1,)), max_prompts=2) == (None, "D0")
    assert picked(p0, decode("D0", token_s=1.0, prompts=(1, 1)), max_prompts=2) is None
    assert picked(p0, decode("D0", token_s=1.0, prompts=(1, 1)), max_prompts=math.inf) == ("P0", "D0")


def test_a_decode_node_with_all_its_prompts_still_takes_what_others_compute():
    assert picked(prefill("P0", prompts=(500,)), decode("D0", prompts=(1, 1)), max_prompts=2) == ("P0", "D0")


# ---- links -----------------------------------------------------------------------------------------


def test_a_pair_needs_a_link():
    assert picked(prefill("P0"), decode("D0", max_running=0, links=())) is None
    assert picked(prefill("P0"), prefill("P1", prompts=(90,)), decode("D0", max_running=0, links=("P1",))) == (
        "P1",
        "D0",
    )


def test_a_link_that_a_request_failed_over_is_not_used_until_it_is_confirmed():
    d0 = decode("D0", max_running=0, doubted=("P0",))
    assert picked(prefill("P0"), d0) is None
    assert picked(prefill("P0"), d0, decode("D1", max_running=9, num_streams=9)) == ("P0", "D1")


def test_a_decode_node_needs_no_link_to_compute_a_prompt():
    assert picked(prefill("P0"), decode("D0", links=())) == (None, "D0")


# ---- requests for one token ------------------------------------------------------------------------


def test_a_request_with_one_token_left_ends_on_the_prefill_node_that_has_it_soonest():
    nodes = prefill("P0", prompts=(90,)), prefill("P1", prompts=(80,)), decode("D0"), make_node("B0", Role.BOTH)
    for record in (make_record(max_tokens=1), make_record(max_tokens=8, num_outputs=7)):
        assert picked(*nodes, record=record) == ("P1", None)


def test_a_request_for_one_token_needs_no_link():
    assert picked(prefill("P0"), record=make_record(max_tokens=1)) == ("P0", None)


def test_a_decode_node_computes_a_request_for_one_token_when_no_prefill_node_is_open():
    nodes = prefill("P0", prompts=(1,)), decode("D0")
    assert picked(*nodes, record=make_record(max_tokens=1), max_prompts=1) == (None, "D0")
    assert picked(*nodes, record=make_record(max_tokens=1), max_prompts=1, cooperative=False) is None


# ---- nodes of both roles, and prompts that no prefill node holds ---------------------------------------


def test_a_node_of_both_roles_computes_prompts_with_or_without_room_and_cooperation():
    both = make_node("B0", Role.BOTH, max_running=0)
    assert picked(both) == picked(both, cooperative=False) == (None, "B0")


def test_of_nodes_of_both_roles_the_one_with_the_shorter_line_and_then_fewer_streams_is_chosen():
    nodes = [make_node(name, Role.BOTH, prompts=lengths) for name, lengths in (("B0", (50,)), ("B1", (49,)))]
    assert picked(*nodes) == (None, "B1")
    nodes = [make_node(name, Role.BOTH, num_streams=count) for name, count in (("B0", 5), ("B1", 4))]
    assert picked(*nodes) == (None, "B1")


def test_a_prompt_that_no_prefill_node_could_hold_is_computed_by_decode_nodes():
    record = make_record(40, max_tokens=200, num_outputs=100)
    small, large = prefill("P0", num_blocks=34), prefill("P0", num_blocks=35)
    for cooperative in (True, False):
        d0 = decode("D0", max_running=0)
        assert picked(small, d0, record=record, cooperative=cooperative) == (None, "D0")
        assert picked(large, d0, record=record, cooperative=cooperative) == ("P0", "D0")


def test_a_prefill_node_that_is_only_full_does_not_make_decode_nodes_without_room_compute():
    assert picked(prefill("P0", prompts=(1,)), decode("D0", max_running=0), max_prompts=1) is None


# ---- without cooperation ---------------------------------------------------------------------------


def test_without_cooperation_every_prompt_is_handed_off_however_long_the_line():
    p0 = prefill("P0", token_s=1.0, prompts=(1000,) * 7)
    assert picked(p0, decode("D0"), cooperative=False) == ("P0", "D0")
    assert picked(p0, decode("D0"), cooperative=False, max_prompts=7) is None


def test_a_pick_changes_no_node():
    nodes = [prefill("P0", prompts=(500,)), decode("D0", num_streams=2)]
    before = [repr(node) for node in nodes]
    assert pick(make_record(), HASHES, nodes, 8, True) is not None
    assert [repr(node) for node in nodes] == before


def test_an_idle_prefill_node_computes_however_soon_a_decode_node_would():
    assert picked(prefill("P0", token_s=1.0), decode("D0", token_s=0.001)) == ("P0", "D0")
    assert picked(prefill("P0", token_s=1.0, prompts=(1,)), decode("D0", token_s=0.001)) == (None, "D0")


def test_a_prefill_node_that_starts_no_prompt_is_not_idle_and_comes_last():
    full, busy = prefill("P0", starts_no_prompt=True), prefill("P1", token_s=1.0, prompts=(5000,))
    assert picked(full, busy, decode("D0"), cooperative=False) == ("P1", "D0")
    assert picked(full, decode("D0", token_s=1.0)) == (None, "D0")
    assert picked(full, decode("D0"), cooperative=False) == ("P0", "D0")


# ---- what is cached where --------------------------------------------------------------------------


def test_the_prompt_goes_where_its_prefix_is_cached():
    assert picked(prefill("P0"), prefill("P1", cached=HASHES[:1]), decode("D0"), cooperative=False) == ("P1", "D0")


def test_a_cached_prefix_is_left_for_a_node_that_is_through_sooner():
    """Cached 20 of 40 tokens are worth waiting for 19 others, and not for 21."""
    p0, d0 = prefill("P0"), decode("D0")
    assert picked(p0, prefill("P1", cached=HASHES[:5], prompts=(19,)), d0, cooperative=False) == ("P1", "D0")
    assert picked(p0, prefill("P1", cached=HASHES[:5], prompts=(21,)), d0, cooperative=False) == ("P0", "D0")


def test_only_the_blocks_before_the_first_gap_need_not_be_computed():
    nodes = prefill("P0", cached=HASHES[:2]), prefill("P1", cached=HASHES[:1] + HASHES[2:]), decode("D0")
    assert picked(*nodes, cooperative=False) == ("P0", "D0")


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_to_be_computed():
    assert prefill("P0", cached=HASHES).num_lacking(40, HASHES) == 1
    assert prefill("P0", cached=HASHES[:9]).num_lacking(40, HASHES) == BLOCK
    assert prefill("P0").num_lacking(40, HASHES) == 40


def test_of_two_prefixes_cached_on_idle_nodes_the_longer_one_is_used():
    nodes = prefill("P0", cached=HASHES[:3]), prefill("P1", cached=HASHES[:7]), decode("D0", max_running=0)
    assert picked(*nodes) == ("P1", "D0")


def test_equally_busy_the_decode_node_that_has_the_blocks_gets_the_stream():
    for num_streams in (0, 5):
        nodes = [decode("D0", num_streams=num_streams), decode("D1", num_streams=num_streams, cached=HASHES[:1])]
        for bytes_per_s in (0.0, 1e6, 1e12):
            for node in nodes:
                node.links = {NodeId("P0"): Link(NodeId("P0"), bytes_per_s=bytes_per_s)}
            assert picked(prefill("P0"), *nodes, cooperative=False) == ("P0", "D1")


def test_blocks_behind_a_gap_need_not_be_moved_either():
    nodes = decode("D0", cached=HASHES[:1]), decode("D1", cached=HASHES[2:4])
    assert picked(prefill("P0"), *nodes, cooperative=False) == ("P0", "D1")


def test_a_busier_decode_node_gets_the_stream_while_moving_its_blocks_takes_longer_than_the_streams_cost():
    """10 blocks of 4 tokens are 2560 bytes, and a stream more costs 32 steps of a millisecond."""

    def chosen(bytes_per_s: float, num_streams: int) -> str | None:
        holder = decode("D0", cached=HASHES, num_streams=num_streams, bytes_per_s=bytes_per_s)
        place = picked(prefill("P0"), holder, decode("D1", bytes_per_s=bytes_per_s), cooperative=False)
        return place[1] if place else None

    assert chosen(2560 / 0.033, num_streams=1) == "D0"
    assert chosen(2560 / 0.031, num_streams=1) == "D1"
    assert chosen(2560 / 0.033, num_streams=2) == "D1"


def test_a_prefix_behind_a_link_of_unknown_speed_draws_nothing_to_a_busier_node():
    nodes = decode("D0", cached=HASHES, num_streams=1), decode("D1")
    assert picked(prefill("P0"), *nodes, cooperative=False) == ("P0", "D1")


def test_many_requests_for_one_hot_prefix_are_spread_over_the_decode_nodes():
    nodes = [decode("D0", cached=HASHES, bytes_per_s=2560 / 0.1), decode("D1", bytes_per_s=2560 / 0.1)]
    for _ in range(12):
        place = picked(prefill("P0"), *nodes, cooperative=False)
        assert place is not None
        chosen = next(node for node in nodes if node.node == place[1])
        chosen.streams[new_request_id()] = 1
    assert [len(node.streams) for node in nodes] == [8, 4]


def test_many_requests_for_one_hot_prefix_are_spread_over_nodes_of_both_roles():
    """The prefix is worth 39 tokens, the same as a bit more than one stream."""
    nodes = [make_node("B0", Role.BOTH, cached=HASHES), make_node("B1", Role.BOTH)]
    for _ in range(8):
        place = picked(*nodes)
        assert place is not None
        next(node for node in nodes if node.node == place[1]).streams[new_request_id()] = 1
    assert [len(node.streams) for node in nodes] == [5, 3]


def test_what_is_cached_on_a_decode_node_without_room_draws_no_stream():
    """All of its ten blocks are wanted, and nine are left."""
    for num_free, expected in ((10, "D1"), (9, "D0")):
        nodes = decode("D0"), decode("D1", cached=HASHES, num_free=num_free)
        assert picked(prefill("P0"), *nodes, cooperative=False) == ("P0", expected)


def test_before_its_first_beat_a_decode_node_draws_no_stream():
    nodes = decode("D0"), decode("D1", None, cached=HASHES)
    assert picked(prefill("P0"), *nodes, cooperative=False) == ("P0", "D0")


def test_streams_and_links_count_for_nothing_where_a_prompt_is_new():
    slow, fast = ({"bytes_per_s": bytes_per_s} for bytes_per_s in (1e3, 1e9))
    both = make_node("B0", Role.BOTH, num_streams=5), make_node("B1", Role.BOTH, prompts=(1,))
    assert picked(*both) == (None, "B0")
    assert picked(prefill("P0", prompts=(500,)), decode("D0", num_streams=5), decode("D1", 0.002)) == (None, "D0")
    assert picked(prefill("P0"), decode("D0", **slow), decode("D1", num_streams=1, **fast)) == ("P0", "D0")


# ---- mostly cached prompts -------------------------------------------------------------------------


def test_a_decode_node_with_most_of_the_prompt_computes_the_rest_though_a_prefill_node_is_idle():
    assert picked(prefill("P0"), decode("D0", cached=HASHES[:8])) == (None, "D0")


def test_without_cooperation_a_mostly_cached_prompt_is_handed_off():
    assert picked(prefill("P0"), decode("D0", cached=HASHES[:8]), cooperative=False) == ("P0", "D0")


def test_an_idle_prefill_node_computes_what_a_decode_node_would_have_more_than_half_as_much_work_with():
    d0 = decode("D0", cached=HASHES[:8])
    assert picked(prefill("P0", cached=HASHES[:6]), d0) == (None, "D0")
    assert picked(prefill("P0", cached=HASHES[:7]), d0) == ("P0", "D0")


def test_an_idle_prefill_node_that_is_sooner_than_the_decode_node_computes_the_prompt():
    """Four tokens here, twenty there."""
    p0 = prefill("P0", cached=HASHES[:5])
    assert picked(p0, decode("D0", token_s=0.0049, cached=HASHES[:9])) == (None, "D0")
    assert picked(p0, decode("D0", token_s=0.0051, cached=HASHES[:9])) == ("P0", "D0")


def test_a_mostly_cached_prompt_is_handed_off_when_the_decode_node_has_no_room_to_its_end():
    record = make_record(40, max_tokens=9)
    for num_blocks, expected in ((12, (None, "D0")), (11, None)):
        d0 = decode("D0", num_blocks=num_blocks, cached=HASHES[:8])
        assert picked(prefill("P0"), d0, record=record) == expected
    d0 = decode("D0", num_blocks=12, num_streams=1, cached=HASHES[:8])
    assert picked(prefill("P0"), d0, record=record) == ("P0", "D0")


def test_a_much_busier_decode_node_computes_no_mostly_cached_prompt():
    """36 cached tokens are worth one stream more, not two."""
    for num_streams, expected in ((1, (None, "D0")), (2, ("P0", "D1"))):
        nodes = decode("D0", cached=HASHES[:9], num_streams=num_streams), decode("D1")
        assert picked(prefill("P0"), *nodes) == expected
