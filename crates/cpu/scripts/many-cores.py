#!/usr/bin/env python3
"""Times tilewise beside PyTorch's scaled_dot_product_attention on a host with many cores, in one run, in turns.

    many-cores.py [--tilewise BINARY] [--threads 16,8,1] [--dtypes f32,bf16] [--shapes NAME,...] [--rounds N] [--scaling 1,2,4,8,16] [--json FILE]

Both get the same inputs (standard normal) and as many threads. In each round both run at least once, and as often as fits into 0.1 s;
the figure of a round is its median, the figure of a case the median over rounds. GFLOP/s count 4*b*hq*sq*sk*d, half of it when
causal; GB/s count K and V once. --scaling times tilewise alone, f32, on the second shape, over these numbers of threads.
The errors are ours against torch in f64 over some rows, beside torch's own.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time
import numpy as np
import torch
import torch.nn.functional as F

SHAPES = {
    "1k-d64": (1, 8, 8, 1024, 1024, 64, False),
    "4k-d128": (1, 8, 8, 4096, 4096, 128, False),
    "4k-d128-causal": (1, 8, 8, 4096, 4096, 128, True),
    "gqa-2k-causal": (1, 32, 8, 2048, 2048, 128, True),
    "b4-2k-d64": (4, 16, 16, 2048, 2048, 64, False),
    "16k-d64-causal": (1, 4, 4, 16384, 16384, 64, True),
    "decode-b1-8k": (1, 32, 8, 1, 8192, 128, False),
    "decode-b8-4k": (8, 32, 8, 1, 4096, 128, False),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Worker:
    """A `tilewise peer-worker`: one JSON object a line each way."""

    def __init__(self, binary, threads, isa=None):
        env = dict(os.environ, **({"TILEWISE_ISA": isa} if isa else {}))
        self.process = subprocess.Popen(
            [binary, "peer-worker", "--backend", "cpu", "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        if not answer["ok"]:
            raise RuntimeError(answer["error"])
        return answer

    def setup(self, folder, shape, dtype):
        names = ("b", "hq", "hkv", "sq", "sk", "d", "causal")
        self.ask(op="setup", contender="tilewise-fa2", shape=dict(zip(names, shape)), dtype=dtype, dir=folder)

    def run(self, n=1):
        return self.ask(op="run", n=n)["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def inputs(shape, folder):
    b, hq, hkv, sq, sk, d, _ = shape
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, d)))
    for name, x in zip("qkv", (q, k, v)):
        x.tofile(os.path.join(folder, name + ".f32"))
    return [torch.from_numpy(x) for x in (q, k, v)]


def error(out, q, k, v, shape):
    """Largest difference from f64 over the first and last rows of the first head."""
    b, hq, hkv, sq, sk, d, causal = shape
    rows = sorted({0, sq // 2, sq - 1})
    worst = 0.0
    for i in rows:
        s = (k[0, 0].double() @ q[0, 0, i].double()) / d**0.5
        if causal:
            s[i + sk - sq + 1:] = float("-inf")
        expected = torch.softmax(s, 0) @ v[0, 0].double()
        worst = max(worst, (out[0, 0, i].double() - expected).abs().max().item())
    return worst


def timed(call, budget=0.1):
    seconds, start = [], time.perf_counter()
    while not seconds or time.perf_counter() - start < budget:
        seconds.append(call())
    return statistics.median(seconds)


def torch_once(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def case(args, worker, threads, dtype, name):
    shape = SHAPES[name]
    b, hq, hkv, sq, sk, d, causal = shape
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        q, k, v = (x.to(DTYPES[dtype]) for x in inputs(shape, folder))
        worker.setup(folder, shape, dtype)
        peer = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hkv)  # noqa: E731
        worker.run()
        theirs_out = peer()
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(timed(lambda: worker.run()[0]))
            theirs.append(timed(lambda: torch_once(peer)))
        path = os.path.join(folder, "out")
        worker.ask(op="output", path=path)
        ours_out = torch.from_numpy(np.fromfile(path, dtype=np.float32).reshape(b, hq, sq, d))
        worker.ask(op="free")
    flop = 4 * b * hq * sq * sk * d / (2 if causal else 1)
    size = (k.numel() + v.numel()) * k.element_size()
    row = {"threads": threads, "dtype": dtype, "shape": name, "dims": shape}
    for system, times, out in (("tilewise", ours, ours_out), ("torch", theirs, theirs_out)):
        s = statistics.median(times)
        row[system] = {"ms": s * 1e3, "gflops": flop / s / 1e9, "gbps": size / s / 1e9, "spread": max(times) / min(times),
                       "error": error(out, q, k, v, shape)}
    row["ratio"] = row["torch"]["ms"] / row["tilewise"]["ms"]
    return row


def scaling(args, threads):
    shape = SHAPES["4k-d128"]
    worker = Worker(args.tilewise, threads)
    with tempfile.TemporaryDirectory(dir=args.tmp) as folder:
        inputs(shape, folder)
        worker.setup(folder, shape, "f32")
        worker.run()
        s = statistics.median(worker.run(3 if threads < 4 else 7))
    worker.close()
    b, hq, _, sq, sk, d, _ = shape
    return {"threads": threads, "ms": s * 1e3, "gflops": 4 * b * hq * sq * sk * d / s / 1e9}


def main():
    split = lambda text: [x for x in text.split(",") if x]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilewise", default="tilewise")
    parser.add_argument("--isa", help="TILEWISE_ISA of ours")
    parser.add_argument("--threads", type=split, default=["16"])
    parser.add_argument("--dtypes", type=split, default=["f32", "bf16"])
    parser.add_argument("--shapes", type=split, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scaling", type=split, default=[])
    parser.add_argument("--tmp", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    parser.add_argument("--json")
    args = parser.parse_args()
    record = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "scaling": [], "cases": []}
    for threads in map(int, args.scaling):
        row = scaling(args, threads)
        record["scaling"].append(row)
        print(f"scaling f32 4k-d128: {threads:2} threads {row['ms']:8.1f} ms {row['gflops']:7.0f} GFLOP/s", flush=True)
    for threads in map(int, args.threads):
        torch.set_num_threads(threads)
        worker = Worker(args.tilewise, threads, args.isa)
        for dtype in args.dtypes:
            for name in args.shapes:
                row = case(args, worker, threads, dtype, name)
                record["cases"].append(row)
                a, b = row["tilewise"], row["torch"]
                unit = "gbps" if row["dims"][3] == 1 else "gflops"
                print(f"{threads:2} {dtype:4} {name:15} tilewise {a['ms']:8.3f} ms {a[unit]:7.1f} {unit}  torch {b['ms']:8.3f} ms "
                      f"{b[unit]:7.1f}  ratio {row['ratio']:5.2f}  error {a['error']:.1e} {b['error']:.1e}", flush=True)
        worker.close()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
