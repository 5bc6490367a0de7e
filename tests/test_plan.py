"""Cuts and placement of variables, without any cluster."""

import pytest

from pstrain import coordinator, plan
from pstrain.plan import Block, Request


def pieces(count):
    """A partitioner that always asks for `count` pieces."""
    return lambda shape, dtype: [count] + [1] * (len(shape) - 1)


def whole(shape, dtype):
    return [1] * len(shape)


def request(path="v", shape=(10, 4), kind="dense", dtype="float32", **kwargs):
    return Request(path, kind, shape, dtype, **kwargs)


def bounds(made, path="v"):
    return [(block.begin, block.end) for block in made.blocks(path)]


def ps_of(made, path="v"):
    return [block.ps for block in made.blocks(path)]


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        (10, 1, [(0, 10)]),
        (10, 2, [(0, 5), (5, 10)]),
        (10, 3, [(0, 4), (4, 7), (7, 10)]),
        (11, 4, [(0, 3), (3, 6), (6, 9), (9, 11)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (2, 5, [(0, 1), (1, 2)]),
        (1, 5, [(0, 1)]),
        (0, 5, [(0, 0)]),
    ],
)
def test_rows_are_cut_evenly_and_the_first_blocks_take_the_remainder(
    rows, count, expected
):
    made = plan.make([request(shape=(rows, 4))], 2, pieces(count))
    assert bounds(made) == expected


@pytest.mark.parametrize("rows", [1, 7, 100, 1001])
@pytest.mark.parametrize("num_ps", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_blocks_cover_all_rows_once_and_in_order(rows, num_ps, count):
    made = plan.make([request(shape=(rows,))], num_ps, pieces(count))
    blocks = made.blocks("v")
    assert blocks[0].begin == 0 and blocks[-1].end == rows
    assert all(a.end == b.begin for a, b in zip(blocks, blocks[1:], strict=False))
    sizes = [block.end - block.begin for block in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert {block.ps for block in blocks} <= set(range(num_ps))


def test_the_partitioner_decides_on_the_number_of_pieces():
    def partitioner(shape, dtype):
        assert shape.as_list() == [10, 4] and dtype.name == "float16"
        return [3, 1]

    made = plan.make([request(dtype="float16")], 4, partitioner)
    assert len(made.blocks("v")) == 3


@pytest.mark.parametrize(
    ("rows", "min_shard_bytes", "max_shards", "expected"),
    [
        (1000, 16_000, 4, 1),
        (1000, 8_000, 4, 2),
        (1000, 1_000, 4, 4),
        (1000, 1_000, 3, 3),
        (1000, 1 << 20, 4, 1),
    ],
)
def test_small_variables_stay_whole_under_the_partitioner_of_a_job(
    rows, min_shard_bytes, max_shards, expected
):
    partitioner = coordinator.size_partitioner(min_shard_bytes, max_shards)
    made = plan.make([request(shape=(rows, 4))], 4, partitioner)
    assert len(made.blocks("v")) == expected


def test_what_must_stay_whole_is_not_cut():
    made = plan.make([request(whole=True)], 4, pieces(4))
    assert bounds(made) == [(0, 10)]


def test_a_scalar_is_one_block_and_needs_no_partitioner():
    def partitioner(shape, dtype):
        raise AssertionError("a scalar has no axis to cut")

    made = plan.make([request(shape=())], 2, partitioner)
    assert bounds(made) == [(0, 1)]
    assert sum(made.bytes_per_ps()) == 4


def test_the_shards_of_one_variable_go_to_different_ps():
    made = plan.make([request()], 4, pieces(4))
    assert sorted(ps_of(made)) == [0, 1, 2, 3]


def test_more_shards_than_ps_go_round():
    made = plan.make([request()], 3, pieces(7))
    assert len(made.blocks("v")) == 7
    per_ps = [ps_of(made).count(ps) for ps in range(3)]
    assert sorted(per_ps) == [2, 2, 3]


def test_a_new_variable_goes_to_the_ps_with_the_fewest_bytes_largest_first():
    sizes = {"a": 10, "b": 60, "c": 50, "d": 30}
    requests = [request(path, (rows,)) for path, rows in sizes.items()]
    made = plan.make(requests, 2, whole)
    assert {path: ps_of(made, path) for path in sizes} == {
        "b": [0],
        "c": [1],
        "d": [1],
        "a": [0],
    }
    assert made.bytes_per_ps() == [70 * 4, 80 * 4]


def test_many_layers_come_out_even():
    requests = [request(f"v{i}", (17 * i + 1, 8)) for i in range(40)]
    assert plan.make(requests, 5, pieces(2)).imbalance() < 1.02


def test_slots_count_where_their_variable_is():
    requests = [request("a", (10,), num_slots=3), request("b", (30,))]
    made = plan.make(requests, 2, whole)
    assert made.bytes_per_ps() == [160, 120]
    placement = made.placements["a"]
    assert placement.block_bytes(placement.blocks[0]) == 160


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("int64", 8), ("bool", 1)]
)
def test_bytes_depend_on_the_dtype(dtype, size):
    assert request(shape=(3, 5), dtype=dtype).num_bytes == 15 * size


def test_bytes_per_ps_add_up_to_the_bytes_of_all_variables():
    requests = [request(f"v{i}", (7 + i, 3), num_slots=i % 3) for i in range(9)]
    made = plan.make(requests, 3, pieces(2))
    assert sum(made.bytes_per_ps()) == sum(r.num_bytes for r in requests)


def test_imbalance_is_the_fullest_ps_over_the_mean():
    requests = [request("a", (30,)), request("b", (10,))]
    made = plan.make(requests, 2, whole)
    assert made.bytes_per_ps() == [120, 40]
    assert made.imbalance() == pytest.approx(1.5)
    assert plan.make(requests, 1, whole).imbalance() == 1.0


def test_a_model_without_variables_has_a_plan():
    made = plan.make([], 2, whole)
    assert made.bytes_per_ps() == [0, 0]
    assert made.imbalance() == 1.0
    assert made.summary() == "bytes: ps 0 0, ps 1 0; max over mean 1.00"


def test_the_plan_is_the_same_every_time_and_keeps_the_order_of_the_model():
    requests = [request(f"v{i}", (5 * (i % 4) + 1, 3)) for i in range(12)]
    first, second = (plan.make(requests, 3, pieces(2)) for _ in range(2))
    assert first == second
    assert list(first.placements) == [f"v{i}" for i in range(12)]


def test_the_text_is_an_aligned_table_with_a_summary():
    requests = [
        request("deep/table", (5000, 16), "table", num_slots=1),
        request("norm/moving_mean", (16,), "state"),
        request("scale", (), "frozen"),
    ]

    def partitioner(shape, dtype):
        return [2, 1] if len(shape) == 2 else [1]

    assert plan.make(requests, 2, partitioner).text().splitlines() == [
        "variable          shape    kind    shards on ps            bytes with slots",
        "deep/table        5000x16  table   0[0:2500] 1[2500:5000]  640,000",
        "norm/moving_mean  16       state   0                       64",
        "scale             scalar   frozen  1                       4",
        "bytes: ps 0 320,064, ps 1 320,004; max over mean 1.00",
    ]


def test_rows_are_the_cells_of_the_text():
    made = plan.make([request("a", (4,)), request("b", ())], 1, whole)
    assert [row[:4] for row in made.rows()] == [
        ["variable", "shape", "kind", "shards on ps"],
        ["a", "4", "dense", "0"],
        ["b", "scalar", "dense", "0"],
    ]


def test_every_kind_of_variable_is_explained():
    assert set(plan.KINDS) == {"table", "dense", "state", "frozen"}
    assert all(plan.KINDS.values())


def test_a_block_knows_its_ps_and_rows():
    made = plan.make([request(shape=(4, 2))], 2, pieces(2))
    assert made.blocks("v") == (Block(0, 0, 2), Block(1, 2, 4))
