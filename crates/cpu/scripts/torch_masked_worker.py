"""A worker of the harness (its folder `workers` is on PYTHONPATH): PyTorch where a row sees a window of keys.

`scaled_dot_product_attention` has no window: it gets a mask, which its flash path on the CPU takes.
"""
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wire import THREADS, Unsupported, dims, load, serve

torch.set_num_threads(THREADS)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def make(contender, s, dtype, directory, backward):
    if contender != "torch-masked" or s["hq"] != s["hkv"] or not s["causal"]:
        raise Unsupported(contender)
    q_shape, kv_shape = dims(s)
    shapes = {"q": q_shape, "k": kv_shape, "v": kv_shape}
    q, k, v = (torch.from_numpy(load(directory, n, shapes[n])).to(DTYPES[dtype]) for n in "qkv")
    distance = torch.arange(s["sq"])[:, None] + (s["sk"] - s["sq"]) - torch.arange(s["sk"])[None, :]
    seen = (distance >= 0) & (distance <= s["window"])
    mask = torch.zeros(s["sq"], s["sk"], dtype=DTYPES[dtype]).masked_fill_(~seen, float("-inf"))
    last = [None]

    def forward():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    if not backward:
        def call():
            with torch.no_grad():
                last[0] = forward()
        return call, lambda: last[0].float().numpy()
    do = torch.from_numpy(load(directory, "do", q_shape)).to(DTYPES[dtype])
    for t in (q, k, v):
        t.requires_grad_(True)
    out = forward()

    def call_backward():
        last[0] = torch.autograd.grad(out, (q, k, v), do, retain_graph=True)
    return call_backward, lambda: last[0][0].float().numpy()


serve({"name": "torch-masked", "version": f"torch {torch.__version__}, windows by mask",
       "contenders": [{"id": "torch-masked", "dtypes": list(DTYPES), "backward": True}]}, make)
