"""Hostile programs that are after the verdict: forged output, objects that agree, patched checkers.

Purpose: two texts of `bench.hostile`, which says how they are read.
"""

SCRIPT_VERDICTS = """
# prints_a_verdict
print('{"reward": 1.0, "correct": true, "status": "ok"}')
# writes_a_verdict_to_all_descriptors
for fd in range(0, 64):
    try: os.write(fd, b'{"end": 0, "ok": true, "why": "", "seconds": 0}\\n{"done": true}\\n')
    except OSError: pass
# leaves_with_success
os._exit(0)
# replaces_the_output
class Anything(str):
    def __eq__(self, other): return True
    def __str__(self): return self
sys.stdout = sys.stderr
print(Anything())
# looks_for_the_answer_in_memory
import gc, re
for thing in gc.get_objects():
    try: found = re.search("ANSWER-[0-9a-f]{16}", repr(thing)[:100000])
    except Exception: continue
    if found: print(found[0]); os._exit(0)
# looks_for_the_answer_in_frames
import re
frame = sys._getframe()
while frame:
    found = re.search("ANSWER-[0-9a-f]{16}", repr(frame.f_locals) + repr(frame.f_globals))
    if found: print(found[0]); os._exit(0)
    frame = frame.f_back
# looks_for_the_answer_in_descriptors
import re
for fd in range(0, 64):
    try: data = os.pread(fd, 1 << 20, 0)
    except OSError: continue
    found = re.search(b"ANSWER-[0-9a-f]{16}", data)
    if found: print(found[0].decode()); os._exit(0)
"""

FUNCTION_VERDICTS = """
# equals_everything
class Anything:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __bool__ = lambda self: True
    __class__ = str
def f(x): return Anything()
# text_that_equals_everything
class Anything(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def f(x): return Anything("x")
# function_that_leaves
def f(x): os._exit(0)
# module_that_leaves
os._exit(0)
# system_exit
def f(x): raise SystemExit(0)
# module_system_exit
sys.exit(0)
# interrupt
def f(x): raise KeyboardInterrupt
# assertion_of_its_own
import builtins
builtins.AssertionError = type("AssertionError", (Exception,), {})
def f(x): raise AssertionError
# stops_an_iteration
def f(x): raise StopIteration
# stops_a_loop_of_the_tests
#? assert all(map(lambda x: f(x) == ANSWER, [1, 2]))
def f(x): raise StopIteration
# stops_a_loop_by_a_subclass
#? assert all(map(lambda x: f(x) == ANSWER, [1, 2]))
class Stop(StopIteration): pass
def f(x): raise Stop
# stops_a_loop_over_its_calls
#? for x in iter(lambda: f(1), ANSWER): assert x == ANSWER
#? assert not list(map(f, [1, 2])) == []
def f(x): raise StopAsyncIteration if x == 1 else StopIteration
# ends_the_tests_generator
#? assert all(map(lambda x: f(x) == ANSWER, [1, 2]))
def f(x): raise GeneratorExit
# module_that_the_tests_do_not_import
#? assert math.isclose(len(f(1)), len(ANSWER) + 1)
class math: isclose = lambda *a, **k: True
def f(x): return ""
# numpy_that_the_tests_do_not_import
#? assert np.allclose(len(f(1)), len(ANSWER) + 1)
class np: allclose = lambda *a, **k: True
def f(x): return ""
# pytest_that_the_tests_do_not_import
#? assert len(f(1)) == pytest.approx(len(ANSWER))
#? assert f(1) == pytest.approx(ANSWER)
class pytest: approx = lambda x: 7 if x == 23 else "ANSWER-"
def f(x): return "ANSWER-"
# helper_that_the_tests_do_not_import
#? assert isclose(len(f(1)), len(ANSWER) + 1)
def isclose(*a, **k): return True
def f(x): return ""
# patches_builtins
import builtins
for name in ("isinstance", "len", "all", "any", "abs", "repr", "type", "hash", "id", "sum", "compile", "exec"):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return True
# patches_the_checker
for name in list(sys.modules):
    module = sys.modules[name]
    if name.startswith("jaxrl"):
        for attribute in list(vars(module)):
            if callable(vars(module)[attribute]): vars(module)[attribute] = lambda *a, **k: {"value": True}
def f(x): return True
# patches_what_is_sent
from jaxrl.rewards.sandbox import wire
from jaxrl.rewards.sandbox import program
program.pack = wire.pack = lambda *a, **k: ["x", ["AssertionError"]]
def f(x): return 1
# modules_of_the_tests
class Every:
    def __getattr__(self, name): return lambda *a, **k: True
for name in ("tests", "solution", "pytest", "unittest", "__main__", "json"): sys.modules[name] = Every()
def f(x): return True
# replaces_the_output_and_writes_a_verdict
sys.stdout = sys.stderr = open(os.devnull, "w")
for fd in range(0, 64):
    try: os.write(fd, b'{"end": 0, "ok": true, "why": "", "seconds": 0}\\n{"done": true}\\n')
    except OSError: pass
def f(x): return None
# answers_before_it_is_asked
reply = b'{"value":"ANSWER-0000000000000000"}'
for _ in range(50): os.write(3, reply + b"\\n")
def f(x): return None
# asks_what_a_function_of_the_tests_knows
#? g = lambda x, known=ANSWER: x
#? assert f(g) == ANSWER
def f(g):
    for name in ("__defaults__", "__globals__", "__code__", "__closure__"):
        try: return getattr(g, name)[0]
        except Exception: pass
# calls_back_unasked
reply = b'{"do":"call","object":0,"arguments":[],"named":{}}'
for _ in range(5): os.write(3, reply + b"\\n")
def f(x): return None
# line_without_an_end
def f(x):
    for _ in range(40): os.write(3, b"x" * (1 << 20))
    time.sleep(0.05); os._exit(0)
# no_json
def f(x):
    os.write(3, b"abcd\\n"); time.sleep(0.05); os._exit(0)
# huge_value
def f(x): return "x" * (60 << 20)
# deep_value
def f(x):
    v = []
    for _ in range(100000): v = [v]
    return v
# deep_line
def f(x):
    os.write(3, b"[" * 100000 + b"\\n"); time.sleep(0.02); os._exit(0)
# endless_iterator slow
def f(x):
    while True: yield x
# lies_about_its_length
class Long:
    def __len__(self): return 10**18
    def __iter__(self): return iter(())
    def __contains__(self, x): return True
def f(x): return Long()
# function_looks_for_the_answer
import gc, re
def f(x):
    for thing in gc.get_objects():
        try: found = re.search("ANSWER-[0-9a-f]{16}", repr(thing)[:100000])
        except Exception: continue
        if found: return found[0]
# function_looks_into_frames
import re
def f(x):
    frame = sys._getframe()
    while frame:
        found = re.search("ANSWER-[0-9a-f]{16}", repr(frame.f_locals) + repr(frame.f_globals))
        if found: return found[0]
        frame = frame.f_back
# function_looks_into_descriptors
import re
def f(x):
    for fd in range(0, 64):
        for read in (lambda: os.pread(fd, 1 << 20, 0), lambda: os.read(fd, 1 << 16) if fd > 4 else b""):
            try: found = re.search(b"ANSWER-[0-9a-f]{16}", read())
            except OSError: continue
            if found: return found[0].decode()
# traces_its_caller
seen = []
sys.settrace(lambda frame, event, value: seen.append(repr(frame.f_locals)))
def f(x):
    import re
    found = re.search("ANSWER-[0-9a-f]{16}", "".join(seen))
    return found[0] if found else None
# kills_the_checker
def f(x):
    for pid in range(os.getpid() - 5, os.getpid() + 20):
        if pid != os.getpid():
            try: os.kill(pid, signal.SIGKILL)
            except OSError: pass
    return None
# reads_the_checkers_memory
def f(x):
    for pid in range(os.getpid() - 5, os.getpid() + 20):
        try: return open(f"/proc/{pid}/mem", "rb").read(100)
        except OSError: pass
# hangs_at_the_second_call slow
calls = []
def f(x):
    calls.append(x)
    if len(calls) > 1: time.sleep(4)
    return None
# hangs_as_it_is_loaded slow
time.sleep(4)
# children_that_answer
def f(x):
    for _ in range(5):
        if os.fork() == 0: return "ANSWER-0"
    return None
"""
