"""A program that behaves like a process of a run, to be launched in its place: steps, checkpoints, a lock, a stop.

`JAXRL_STAND_IN` in its environment names a folder. `plan.json` there says what goes wrong: by `world.process`, the step
and what happens then; and how long steps take. Every process waits in each step for all others, as a collective does;
process 0 writes `run.json` in the run directory every two steps, and the bits of a run that none disturbed.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["JAXRL_STAND_IN"])
COORDINATOR = os.environ.get("JAXRL_COORDINATOR", "none")
PROCESS = int(os.environ["JAXRL_PROCESS_ID"])
NUM = next(int(each.partition("=")[2]) for each in sys.argv if each.startswith("hosts.num="))
RUN = FOLDER / "run"
STEPS, STEP_S, SAVE_FREQ = 6, 0.03, 2


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def read(path: Path, default: str) -> str:
    return path.read_text() if path.exists() else default


def go_wrong(what: str) -> None:
    print(f"process {PROCESS} is about to {what}", flush=True)
    match what.split():
        case ["signal", name]:
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(60)
        case ["exit", status]:
            print(f"jaxrl: process {PROCESS} cannot go on", file=sys.stderr, flush=True)
            os._exit(int(status))
        case ["kill-agent"]:
            os.kill(os.getppid(), signal.SIGKILL)
        case ["kill-guard"]:
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        case ["kill-both"]:
            agent = os.getppid()
            guard = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(guard, signal.SIGSTOP)  # or it might have time to clean up
            os.kill(agent, signal.SIGSTOP)
            os.kill(guard, signal.SIGKILL)
            os.kill(agent, signal.SIGKILL)
        case ["stop-agent"]:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
            time.sleep(600)


def main() -> None:
    if PROCESS == 0:
        RUN.mkdir(exist_ok=True)
        lock = os.open(RUN / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"jaxrl: {RUN} belongs to a run that is still going", file=sys.stderr)
            sys.exit(2)
        world = int(read(FOLDER / "worlds", "0")) + 1
        write(FOLDER / "worlds", str(world))
        write(FOLDER / f"coordinator.{COORDINATOR}", str(world))
        signal.signal(signal.SIGUSR2, lambda *_: write(FOLDER / "stop", ""))  # `jaxrl.runtime.stop.WISH`
    else:  # which world this is, process 0 knows
        while not (FOLDER / f"coordinator.{COORDINATOR}").exists():
            time.sleep(0.005)
        world = int((FOLDER / f"coordinator.{COORDINATOR}").read_text())
    write(FOLDER / f"started.{world}.{PROCESS}", " ".join(sys.argv[1:]))
    # what a process leaves behind: a child, and one that has left for a session of its own
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    plans = json.loads(read(FOLDER / "plan.json", "{}"))
    plan, step_s = plans.get(f"{world}.{PROCESS}", {}), plans.get("step_s", STEP_S)
    step = json.loads(read(RUN / "run.json", "{}")).get("checkpoint") or 0
    bits = read(RUN / f"bits.{step}", "")
    place = " on a terminal" if sys.stdout.isatty() else ""
    print(f"process {PROCESS} begins with step {step}{place}", flush=True)
    while step < STEPS:
        if str(step) in plan:
            go_wrong(plan[str(step)])
        write(FOLDER / f"at.{world}.{PROCESS}", str(step))
        while any(int(read(FOLDER / f"at.{world}.{other}", "-1")) < step for other in range(NUM)):
            time.sleep(0.005)
        time.sleep(step_s)
        stopped = (FOLDER / f"stop.{world}.{step}").exists()
        if PROCESS == 0 and (FOLDER / "stop").exists() and not stopped:
            write(FOLDER / f"stop.{world}.{step + 1}", "")  # all hear of it before that step
        if stopped:
            break
        step, bits = step + 1, bits + f"{step} "
        if PROCESS == 0 and (step % SAVE_FREQ == 0):
            write(RUN / f"bits.{step}", bits)
            write(RUN / "run.json", json.dumps({"checkpoint": step}))
    if PROCESS == 0 and step == STEPS:
        write(RUN / "bits", bits)
    if "end" in plan:
        go_wrong(plan["end"])
    sys.exit(0)


main()
