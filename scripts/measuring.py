"""Shared by the scripts that measure: builds, boots, counts and prints."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

# Debian's package of each program.
PACKAGES = {"valgrind": "valgrind", "strace": "strace", "ib_write_lat": "perftest", "gcc": "gcc"}


# On the host.

def enter_repository():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))


def install(*programs, headers=()):
    """Installs missing programs, and libraries by their headers."""
    missing = [PACKAGES[program] for program in programs if not shutil.which(program)]
    packages = {"infiniband/verbs.h": ["libibverbs-dev", "libc6-dev"], "rdma/rdma_cma.h": ["librdmacm-dev"]}
    for header in headers:
        if not os.path.exists(f"/usr/include/{header}"):
            missing += packages[header]
    if missing:
        sudo = [] if os.geteuid() == 0 else ["sudo"]
        run(sudo + ["apt-get", "update", "-qq"], stdout=sys.stderr)
        run(sudo + ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing], stdout=sys.stderr)


def build_benches(*names, features=()):
    """Builds benches and returns their paths by name."""
    wanted = [word for name in names for word in ("--bench", name)]
    wanted += ["--features", ",".join(features)] if features else []
    # Incremental builds inline less.
    lines = output(["cargo", "bench", *wanted, "--no-run", "--message-format=json-render-diagnostics"],
                   env=os.environ | {"CARGO_INCREMENTAL": "0"}).splitlines()
    built = [json.loads(line) for line in lines if line.startswith("{")]
    return {entry["target"]["name"]: entry["executable"] for entry in built if entry.get("executable")}


def build_perf():
    """Builds examples/perf and returns its path."""
    run(["cargo", "build", "--release", "-p", "perf", "--features", "perf/ibverbs"])
    return os.path.abspath(os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "perf"))


def build_beside_c(*names, connect=False):
    """Builds benches and programs of benches/c, and returns their paths by name: `raw`, and `connect-c` if asked.

    Copies the benches without line information, which Valgrind is slow to read.
    """
    programs = {}
    for name, built in build_benches(*names, features=["ibverbs"]).items():
        programs[name] = os.path.join(os.path.dirname(os.path.dirname(built)), name)
        run(["strip", "--strip-debug", "-o", programs[name], built])
    directory = os.path.dirname(programs[names[0]])
    sources = [("raw", "raw", ["ibverbs"])] + ([("connect", "connect-c", ["rdmacm", "ibverbs"])] if connect else [])
    for source, name, libraries in sources:
        programs[name] = os.path.join(directory, name)
        run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-O2", "-o", programs[name],
             f"benches/c/{source}.c", *(f"-l{library}" for library in libraries)])
    return programs


def boot(script, options, task, limit="1800"):
    """Runs the guest's part of `script` in a virtual machine and returns its results."""
    results = []
    # The guest ends with this process, however that ends.
    command = ["setpriv", "--pdeathsig", "TERM", "scripts/rxe-vm", *options, os.path.abspath(script), "--guest",
               json.dumps(task)]
    environment = os.environ | {"RXE_VM_TIMEOUT": os.environ.get("RXE_VM_TIMEOUT", limit)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as machine:
        for line in machine.stdout:
            results.append(json.loads(line))
            progress(results[-1])
    if machine.returncode != 0:
        sys.exit(machine.returncode)
    return results


def progress(result):
    print(" ".join(f"{name}={value}" for name, value in result.items()), file=sys.stderr, flush=True)


# Anywhere.

def run(command, **options):
    subprocess.run(command, check=True, **options)


def output(command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def found(part, **result):
    """Reports a result to `boot`."""
    print(json.dumps({"part": part} | result), flush=True)


def cells(text):
    """Returns the rows of the tables in a text, without their borders."""
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("|")]


def values(text):
    """Returns the numbers of a line of name=value pairs."""
    pairs = (pair.split("=", 1) for pair in text.split() if "=" in pair)
    return {name: int(value) for name, value in pairs if value.isdigit()}


def profiled(command, *options, **environment):
    """Runs a command under callgrind; returns its output, its instructions and the profile."""
    with tempfile.NamedTemporaryFile("r") as out:
        ran = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={out.name}", *options, *command],
                             capture_output=True, text=True, env=os.environ | environment)
        if ran.returncode != 0:
            sys.exit(ran.stderr)
        profile = out.read()
    return ran.stdout, int(re.search(r"^(?:summary|totals): *(\d+)", profile, re.M).group(1)), profile


def simulated(command, function):
    """Returns the instructions within a function, and its accesses that miss caches of 32 KiB and of 1 MiB."""
    caches = ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64"]
    # Callgrind counts each byte of `rep movsb` as an instruction, so the C library copies by vectors.
    _, _, profile = profiled(command, *caches, f"--toggle-collect={function}",
                             GLIBC_TUNABLES="glibc.cpu.x86_rep_movsb_threshold=100000000")
    names, counts = (re.search(rf"^{line}: *(.*)", profile, re.M).group(1).split() for line in ("events", "summary"))
    counted = dict(zip(names, map(int, counts)))
    if not counted["Ir"]:
        sys.exit(f"nothing was counted in {function}")
    return [counted["Ir"], *(sum(counted[miss] for miss in misses) for misses in (("D1mr", "D1mw"), ("DLmr", "DLmw")))]


def instructions(command, short, long):
    """Returns the user-space instructions of an operation; `command(n)` runs n of them."""
    counts = [profiled(command(operations))[1] for operations in (short, long)]
    return (counts[1] - counts[0]) / (long - short)


def functions(command, short, long):
    """Returns the functions of an operation and their own instructions, largest first."""
    counted = []
    for operations in (short, long):
        own, names, function, called = {}, {}, None, False
        for line in profiled(command(operations))[2].splitlines():
            if match := re.match(r"fn=\((\d+)\)(?: (.*))?", line):
                function = names.setdefault(match[1], match[2])
            elif match := re.match(r"cfn=\((\d+)\)(?: (.*))?", line):
                names.setdefault(match[1], match[2])
            elif line.startswith("calls="):
                called = True
            elif re.match(r"[\d+*-]", line):
                # The line after a call has the costs of the callee.
                if not called:
                    own[function] = own.get(function, 0) + int(line.split()[1])
                called = False
        counted.append(own)
    each = {name: (count - counted[0].get(name, 0)) / (long - short) for name, count in counted[1].items()}
    return sorted(((name, count) for name, count in each.items() if count >= 0.5), key=lambda row: -row[1])


def syscalls(command, short, long):
    """Returns the system calls of an operation by name; `command(n)` runs n operations."""
    counted = []
    for operations in (short, long):
        with tempfile.NamedTemporaryFile("r") as out:
            run([*strace(out.name), *command(operations)], stdout=subprocess.DEVNULL)
            counted.append(counts(out.name))
    return difference(*counted, long - short)


def strace(path):
    """Returns the start of a command whose system calls strace counts into a file."""
    return ["strace", "-f", "-c", "-U", "calls,name", "-o", path]


def counts(*paths):
    """Returns the sums of the counts in files of `strace`."""
    total = Counter()
    for path in paths:
        with open(path) as lines:
            for count, call in re.findall(r"^ *(\d+) +(\w+)$", lines.read(), re.M):
                total[call] += int(count)
    del total["total"]
    return total


def difference(short, long, operations):
    """Returns the system calls of an operation by name, from the counts of two runs."""
    each = {call: (count - short[call]) / operations for call, count in sorted(long.items())}
    return {call: count for call, count in each.items() if count >= 0.01}


def table(head, rows):
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if row is rows[0]:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
