"""What compiled code keeps for backward: halos are put together again, not kept.

torch's partitioner never recomputes a concatenation that a convolution reads in backward. It would
keep the block with its halos beside the tensor that the producer keeps anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from networkx.algorithms.flow import boykov_kolmogorov, maxflow
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy


class RebuildHalos(CustomPartitionerFn):
    """torch's min-cut partitioner, told to recompute the blocks that carry received halos."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The forward and the backward graph of a joint graph."""
        mark_halos(gm)
        # Between the statistics of a norm and their use stands a collective, so that the heuristic
        # would keep what a fused norm recomputes from its input.
        with functorch_config.patch(ban_recompute_used_far_apart=False), quick_cuts():
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """Changes with what decides the code, so that cached code does too."""
        return get_hash_for_files((__file__, str(Path(__file__).with_name("ordering.py"))))


@contextmanager
def quick_cuts() -> Iterator[None]:
    """Context in which the partitioner finds its minimum cut by Boykov and Kolmogorov's algorithm.

    torch takes networkx's default, preflow-push, which took up to 45 % of the time of compiling a
    network, and on a graph of 620 nodes 30 times as long as this. The cut is the same: of all
    minimum cuts networkx returns the one nearest the sink, whatever the flow.
    """
    before = maxflow.default_flow_func
    maxflow.default_flow_func = boykov_kolmogorov
    try:
        yield
    finally:
        maxflow.default_flow_func = before


def mark_halos(joint: GraphModule) -> list[Node]:
    """Marks assembled blocks that the backward reads; returns them.

    Any concatenation will do: its parts are kept instead, which costs no more than the whole.
    """
    backward: set[Node] = set()
    marked = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                backward.add(node)
        elif any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    for node in reversed(joint.graph.nodes):
        if node in backward or node.target is not torch.ops.aten.cat.default:
            continue
        if any(user in backward or user in marked for user in node.users):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
            marked.append(node)
    return marked
