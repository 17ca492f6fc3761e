"""Store one block of KV cache and fetch it back into another page: the smallest use of the client library."""

import sys
import uuid

import numpy as np

from kvmover_client import ROOT, Client, Layout, Manifest, RegionMemory, block_keys, paged_geometry

layout = Layout.uniform(layers=4, tokens=64, token_bytes=656)
manifest = Manifest("my-model", weights_digest=b"w" * 32, tokenizer_digest=b"t" * 32, layout=layout, dtype="fp8_e4m3")

with Client.connect(f"unix://{sys.argv[1]}", name="first-fetch") as client:
    model = client.register_model(manifest)
    geometry = paged_geometry(layout, pages=2)  # the engine's KV pages: here two pages of one block each
    with RegionMemory.create(geometry.size_bytes, "kv") as memory:
        region = client.register_region(memory, geometry, model)
        for layer in range(layout.layer_count):
            region.page_view(layer, 0, 0)[:] = layer + 1  # what a forward pass would have written

        keys = block_keys(model.fingerprint, tokens=range(64), block_tokens=64)
        request = uuid.uuid4().hex  # a request's name is used once; a second try of it is attempt 2
        stored = client.store_blocks(request, 1, model, keys, ROOT, 0, region, pages=[0])
        print("stored:", stored.end().reason.name)

        print("blocks found:", client.lookup(model, keys).prefix_blocks)
        fetched = client.fetch_blocks(request, 1, model, keys, region=region, pages=[1])
        print("fetched:", fetched.result().blocks[0].state.name)  # HIT, or MISS or FAILED with a reason
        same = all(np.array_equal(region.page_view(n, 0, 0), region.page_view(n, 0, 1)) for n in range(4))
        print("every byte is right:", same)
        client.unregister_region(region)
