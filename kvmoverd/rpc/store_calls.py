"""StoreBlocks: the chains of a call, checked."""

from __future__ import annotations

from collections.abc import Sequence

from kvmover_proto import engine_pb2
from kvmoverd.core.errors import BadKeys, BadRequest
from kvmoverd.core.keys import KEY_BYTES, split_keys
from kvmoverd.node.storing import Chain, Chains

DEPTH_MAX = (1 << 32) - 1


def chains_of(request: engine_pb2.StoreBlocksRequest) -> Chains:
    """The first chain has as many blocks as the others leave of `block_keys`. Raises `BadKeys`, `BadRequest`."""
    keys = split_keys(request.block_keys)
    if any(chain.blocks == 0 for chain in request.chains):
        raise BadKeys("a chain has 0 blocks, must have 1 or more")
    others = sum(chain.blocks for chain in request.chains)
    if others > len(keys):
        raise BadKeys(f"chains have {others} blocks together, block_keys has {len(keys)}")
    at = len(keys) - others
    chains = [_chain(keys[:at], request)]
    for chain in request.chains:
        chains.append(_chain(keys[at : at + chain.blocks], chain))
        at += chain.blocks
    return Chains(tuple(chains))


def _chain(keys: Sequence[bytes], message: engine_pb2.StoreBlocksRequest | engine_pb2.StoreChain) -> Chain:
    if len(message.parent_key) != KEY_BYTES:
        raise BadKeys(f"parent_key has {len(message.parent_key)} bytes, must have {KEY_BYTES}")
    if message.first_depth + len(keys) > DEPTH_MAX:
        raise BadRequest(f"first_depth is {message.first_depth} for {len(keys)} blocks, {DEPTH_MAX} a chain are taken")
    return Chain(keys, message.parent_key, message.first_depth)
