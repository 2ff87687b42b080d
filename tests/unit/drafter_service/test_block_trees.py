"""Trees out of blocks: the public search reproduced, the best of their size, with any head."""

import heapq
import json
from itertools import product

import numpy as np
import pytest
import torch
from block_cases import SWITCHES, VOCAB, make_run, tiny_net
from block_golden import tensors_of

from drafter_service.dflash.block_tree import best_first
from drafter_service.dflash.reference import run_block
from drafter_service.ranking import NodeRows, rank_children
from protos.exchange import Plan, PlanKind
from protos.params import SamplingParams
from protos.tree import CandidateTree

LOGITS = (
    "depth3",
    "identical_rows",
    "mixed_sharpness",
    "random_flat",
    "random_peaked",
    "small_vocab",
    "trained_drafter",
)
GREEDY = SamplingParams(temperature=0.0)


def marginals(logits, count):
    groups = [NodeRows(1, GREEDY, position) for position in range(len(logits))]
    ranked = rank_children(logits, groups, torch.arange(logits.shape[1]), count)
    return ranked.ids, ranked.scores


@pytest.mark.parametrize("budget", [8, 16, 60])
@pytest.mark.parametrize("name", LOGITS)
def test_the_search_takes_the_nodes_the_public_one_takes(golden_dir, name, budget):
    directory = golden_dir / "dflash" / "ddtree"
    expected = json.loads((directory / "trees.json").read_text())[f"{name}.budget{budget}"]
    tree = best_first(*marginals(tensors_of(directory)[f"logits.{name}"], budget), budget)
    assert tree.num_nodes == expected["num_nodes"]
    if expected["min_gap_between_consecutive_pops"] > 1e-5:
        assert list(tree.tokens) == expected["node_tokens"]
        assert list(tree.parents) == expected["parents_with_root"][1:]
        assert list(tree.depths()) == expected["node_depths"]
    assert tree.scores == pytest.approx(expected["node_cum_logprob"], abs=0.02, rel=1e-3)
    assert float(np.exp(tree.scores).sum()) == pytest.approx(expected["sum_path_prob"], rel=5e-3)


def test_walks_accept_the_nodes_the_public_walk_accepts(golden_dir):
    directory = golden_dir / "dflash" / "ddtree"
    trees = json.loads((directory / "trees.json").read_text())
    for walk in json.loads((directory / "walks.json").read_text()):
        known = trees[walk["tree"]]
        scores = tuple(known["node_cum_logprob"])
        tree = CandidateTree(
            tuple(known["node_tokens"]), tuple(known["parents_with_root"][1:]), scores
        )
        table, node, accepted = tree.children(), 0, [0]
        while (following := table[node].get(walk["posterior_per_node"][node])) is not None:
            node = following
            accepted.append(node)
        assert accepted == walk["accepted_node_indices"]
        assert walk["posterior_per_node"][node] == walk["bonus"]


def test_our_trees_hold_more_probability_than_those_that_add_whole_sibling_sets(golden_dir):
    """JetSpec counts the root and adds all siblings of every node it opens."""
    directory = golden_dir / "dflash"
    logits = tensors_of(directory / "ddtree")
    compared = 0
    for name, known in json.loads((directory / "jetspec" / "trees.json").read_text()).items():
        source = f"logits.{name.split('.')[0]}"
        if source not in logits:
            continue
        theirs = np.exp(known["cum_logprob"][1:]).sum()
        num_nodes = known["num_nodes"] - 1
        ours = best_first(*marginals(logits[source], num_nodes), num_nodes)
        assert float(np.exp(ours.scores).sum()) >= theirs - 5e-3
        compared += 1
    assert compared


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_that_size_is_better(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 4, generator=generator).log_softmax(-1).sort(descending=True).values
    ids = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(3)])
    every = [
        float(sum(scores[level, rank] for level, rank in enumerate(ranks)))
        for depth in (1, 2, 3)
        for ranks in product(range(4), repeat=depth)
    ]
    for num_nodes in (1, 5, 20, 84, 100):
        tree = best_first(ids.numpy(), scores.double().numpy(), num_nodes)
        assert tree.num_nodes == min(num_nodes, 84)
        best = heapq.nlargest(num_nodes, every)
        assert sorted(tree.scores, reverse=True) == pytest.approx(best, abs=0.01)


def test_ids_that_filters_removed_are_not_drafted():
    scores = np.array([[-0.5, -1.0, -np.inf], [-0.2, -np.inf, -np.inf], [-np.inf] * 3])
    tree = best_first(np.array([[1, 2, 3]] * 3), scores, 50)
    assert sorted(zip(tree.tokens, tree.depths(), strict=True)) == [(1, 1), (1, 2), (1, 2), (2, 1)]
    nothing = best_first(np.array([[1, 2, 3]] * 3), np.full((3, 3), -np.inf), 50)
    assert nothing.num_nodes == 0


class PathScores:
    """Log-scores of what may follow any path, from the plain definition of a serial block."""

    def __init__(self, run, base_len):
        self.net = run.net
        self.anchor = run.tokens[base_len - 1]
        fused = self.net.fuse(run.features[: base_len - 1])
        self.block = run_block(self.net, fused, self.anchor)

    def following(self, path):
        config, net = self.net.config, self.net
        tokens = [self.anchor, *path]
        slot = config.first_draft_slot
        if net.candidate_selector is not None:
            hidden = self.block.hidden[slot + len(path)]
            unary, ids = self.block.logits[slot + len(path)].topk(16)
            before = torch.tensor([tokens[-1]])
            values = net.candidate_selector.scores(unary, ids, before, hidden)[0]
        else:
            state = net.markov_head.start(1)
            for offset, token in enumerate(tokens):
                hidden = self.block.hidden[slot + offset][None]
                bias, state = net.markov_head.step(torch.tensor([token]), hidden, state)
            values, ids = self.block.logits[slot + len(path)] + bias[0], net.target_ids
        return dict(zip(ids.tolist(), values.log_softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash2"])
def test_a_tree_over_paths_holds_the_best_paths_of_all(name):
    run = make_run(tiny_net(**SWITCHES[name]))
    known = PathScores(run, 20)
    every, frontier = [], {(): 0.0}
    for _ in range(3):
        deeper = {}
        for path, score in frontier.items():
            for token, step in known.following(path).items():
                deeper[(*path, token)] = score + step
        every.extend(deeper.values())
        frontier = dict(heapq.nlargest(200, deeper.items(), key=lambda item: item[1]))
    tree = run.draft(20, Plan(PlanKind.BLOCK, 3, 1, 24)).tree
    assert tree.num_nodes == 24
    best = heapq.nlargest(24, every)
    assert sorted(tree.scores, reverse=True) == pytest.approx(best, abs=0.02)


@pytest.mark.parametrize("name", ["in place", "anchor first", "vanilla", "dflash2"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_tree_begins_with_the_chain_and_keeps_its_plan(name, temperature):
    net = tiny_net(**SWITCHES[name])
    params = SamplingParams(temperature=temperature, seed=3, top_p=0.9, max_tokens=64)
    chain = make_run(net, params=params).draft(20).tree.tokens
    for plan in (Plan(PlanKind.TREE, 4, 3, 14), Plan(PlanKind.BLOCK, 5, 1, 30)):
        result = make_run(net, params=params).draft(20, plan)
        tree = result.tree
        assert tree.num_nodes <= plan.nodes
        assert tree.depth <= plan.depth
        path = [tree.tokens[node - 1] for node in tree.best_path()]
        assert path == list(chain[: len(path)])
        assert [ids[0] for ids in result.ranked_ids][: len(path)] == path
        if plan.kind is PlanKind.TREE:
            assert max(len(children) for children in tree.children()) <= plan.width


def test_noise_makes_the_drafter_guess_with_the_targets_own_dice():
    """Over many seeds drafts differ, and each draft is the best of logits / T + noise."""
    net = tiny_net()
    drafts = set()
    for seed in range(5):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=64)
        run = make_run(net, params=params)
        values = torch.stack(run.plain(20).scores)
        groups = [NodeRows(1, params, 20 + slot) for slot in range(len(values))]
        expected = rank_children(values, groups, torch.arange(VOCAB), 1).ids[:, 0].tolist()
        drafted = list(run.draft(20).tree.tokens)
        assert drafted == expected
        drafts.add(tuple(drafted))
    assert len(drafts) == 5
