"""Check devices, links and kernels before a long run: a matrix product on each device, a copy between each pair, every
all-reduce that can run here against float64 and against itself. Exit status 1 if a check fails.
"""

import argparse
import os
import sys
import time

from nemotron_jax import cli, processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tensor-parallel", type=cli.positive, metavar="N", help="ranks of the tensor axis (default: all devices)")
    add("--data-parallel", type=cli.positive, default=1, metavar="N", help="ranks of the data axis (default: 1)")
    add("--copy-bytes", type=cli.positive, metavar="N", help="size of each copy (default: 16 MiB between GPUs)")
    add("--repeats", type=cli.positive, default=50, metavar="N", help="calls of each repeat test (default: 50)")


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    args.tensor_parallel = args.tensor_parallel or _devices(args.data_parallel)
    mesh = cli.build_mesh(args)
    from nemotron_jax import device_checks

    shared = processes.share_a_gpu()  # then no message is above 64 KiB
    size = args.copy_bytes or (1 << 18 if mesh.devices.flat[0].platform == "cpu" else 1 << 16 if shared else 16 << 20)
    tokens = 8 if shared else device_checks.TOKENS
    report = {"versions": device_checks.versions(), "topology": device_checks.topology(mesh)}
    if not args.json:
        _print_about(report)
    checks = []
    for check in device_checks.every_check(mesh, copy_bytes=size, repeats=args.repeats, tokens=tokens):
        checks.append({"name": check.name, "ok": check.ok, "detail": check.detail, "seconds": check.seconds})
        if not args.json:
            word = {True: "ok", False: "FAILED", None: "not run"}[check.ok]
            print(f"{word:8} {check.name}: {check.detail} ({check.seconds:.1f} s)", flush=True)
    ok = all(check["ok"] is not False for check in checks)
    choices, reasons = device_checks.chosen(mesh), device_checks.unavailable(mesh)
    if args.json:
        report |= {"checks": checks, "ok": ok, "implementations": choices, "unavailable": reasons}
        report |= {"seconds": round(time.perf_counter() - started, 1), "devices": cli.device_names(mesh)}
        cli.print_json(report)
    else:
        print("what the plan 'auto' takes:")
        for c in choices:
            shape = f"{c['tokens']} x {c['hidden']} {c['dtype']}"
            print(f"  {shape:22} {c['implementation']:10} {c['reason']}")
        for name, reason in reasons.items():
            print(f"  {name} does not run here: {reason}")
        failed = [str(check["name"]) for check in checks if check["ok"] is False]
        ran = sum(check["ok"] is not None for check in checks)
        print(f"{len(failed)} of {ran} checks failed: {', '.join(failed)}" if failed else f"{ran} checks passed")
    return cli.DONE if ok else cli.FAILED


def _devices(data: int) -> int:
    """The tensor degree that takes every GPU here; without any, two virtual devices, so that there is a sum."""
    if processes.active():
        return 1  # all devices of all processes
    found = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else cli.gpus()
    return max(1, found // data) if found else 2


def _print_about(report: dict) -> None:
    print(", ".join(f"{k} {v}" for k, v in report["versions"].items() if v))
    topology = report["topology"]
    machines = ", ".join(dict.fromkeys(topology["machines"]))
    print(f"{topology['processes']} processes on {machines}; mesh {topology['mesh']}")
    for d in topology["devices"]:
        print(f"  device {d['id']} of process {d['process']}: {d['kind']}, {d['place']}")
    if topology["unreachable_reason"]:
        print(f"peers' memory cannot be reached: {topology['unreachable_reason']}")
    sys.stdout.flush()
