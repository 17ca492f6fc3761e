"""One prompt on a prefill and a decode node: stored, hinted at, then read as the nodes decide, in parts, and in part only.

two_nodes.py PREFILL_SOCKET DECODE_SOCKET PREFILL_NODE DECODE_NODE: the sockets and names of two daemons that have each other
among their [[peers]] and share a storage directory. Both engines are played here; each has a page for each block.
"""

import sys
import uuid

from kvmover_client import (
    ROOT,
    Client,
    Layout,
    Manifest,
    Part,
    Path,
    Plan,
    RegionMemory,
    StoreChain,
    block_keys,
    paged_geometry,
)

prefill_socket, decode_socket, prefill_node, decode_node = sys.argv[1:]
layout = Layout.uniform(layers=4, tokens=64, token_bytes=656)
manifest = Manifest("my-model", weights_digest=b"w" * 32, tokenizer_digest=b"t" * 32, layout=layout, dtype="fp8_e4m3")
geometry = paged_geometry(layout, pages=8)
pages = range(8)
prompt = [uuid.uuid4().int % 100_000 for _ in range(8 * 64)]


def write(region, blocks):
    for layer in range(4):
        for block in pages:  # block n lies in page n; each has bytes of its own
            region.page_view(layer, 0, block)[:] = 10 * layer + block + 1 if block in blocks else 0


def right(region):
    return all((region.page_view(layer, 0, n) == 10 * layer + n + 1).all() for layer in range(4) for n in pages)


with (
    Client.connect(f"unix://{prefill_socket}", name="prefill") as prefill,
    Client.connect(f"unix://{decode_socket}", name="decode") as decode,
    RegionMemory.create(geometry.size_bytes, "prefill-kv") as prefill_memory,
    RegionMemory.create(geometry.size_bytes, "decode-kv") as decode_memory,
):
    model, decode_model = prefill.register_model(manifest), decode.register_model(manifest)
    source = prefill.register_region(prefill_memory, geometry, model)
    target = decode.register_region(decode_memory, geometry, decode_model)
    keys = block_keys(model.fingerprint, prompt, block_tokens=64)

    write(source, pages)
    chains = [StoreChain(keys[:5], ROOT, 0), StoreChain(keys[5:], keys[4], 5)]  # two sequences would be two chains, too
    print("stored:", prefill.store_chains(uuid.uuid4().hex, 1, model, chains, source, pages).end().reason.name)
    # How many leading blocks will be in the pool: 0 for up to two storage.poll, until this node has heard of them.
    print("hinted at:", decode.prefetch(decode_model, keys, expected_in_s=2.0))

    for says in (
        {"path": Path.AUTO},  # the nodes decide, and may take third nodes
        {"path": Path.AUTO, "no_helpers": True},
        {"path": Path.AUTO, "resident_blocks": 3},  # the first three are in the pages already
        {"path": Path.PARTS, "parts": [Part(prefill_node, [(0, 2), (6, 8)]), Part(decode_node, [(2, 6)])]},
    ):
        write(source, range(says.get("resident_blocks", 0)))
        write(target, ())
        request = uuid.uuid4().hex
        plan = Plan(
            request,
            1,
            model.fingerprint,
            block_keys=keys,
            tail_tokens=0,
            hit_blocks=prefill.lookup(model, keys).prefix_blocks,
            decode_node=decode_node,
            region_id=source.region_id,
            page_sets=[pages],
            **says,
        )
        assembly = decode.assemble_blocks(request, 1, decode_model)
        stream, push = prefill.stream_layers(plan), prefill.push_layers(plan)
        good_blocks = stream.prefix().prefix_blocks  # what comes after these the engine computes
        for layer in range(4):
            stream.wait_layer(layer)  # here the engine computes the layer
            push.computed(layer + 1)
        ends = [stream.end(), push.end()]
        assembly.whole()
        ends += [decode.deliver(request, 1, target, pages).end(), assembly.end()]
        told = ", ".join(f"{name} {value}" for name, value in says.items() if name != "parts")
        print(f"{told}: {good_blocks} blocks, {', '.join(end.reason.name for end in ends)},", end=" ")
        print("every byte is right" if right(source) and right(target) else "WRONG BYTES")
    prefill.unregister_region(source)
    decode.unregister_region(target)
