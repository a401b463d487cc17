"""A Python interpreter for the policy, in the sandbox of rewards/sandbox, such as for GSM8K or MATH.

torchrun train_grpo.py --tools environments/python.py
"""

from rewards.sandbox import run_tests, self_test

self_test()  # at import: a machine that cannot run code safely stops a run before it starts
SECONDS = 5.0  # CPU time of a program
MOST = 3800  # characters that are returned. The sandbox's verdict has room for 4,000.

_PRINTED = f"""
import contextlib, io, traceback

def printed():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(PROGRAM, "program.py", "exec"), {{"__name__": "__main__"}})
        except SystemExit:
            pass
        except BaseException as error:
            print(traceback.format_exception_only(error)[-1].strip())
    text = out.getvalue()
    return text if len(text) <= {MOST} else text[:{MOST}] + f" ... (cut: {{len(text)}} characters)"
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. Each call starts anew: names of earlier calls are gone.

    Args:
        code: the program, which has the standard library, no files and no network
    """
    verdict = run_tests(f"PROGRAM = {code!r}\n{_PRINTED}", ["assert False, printed()"], timeout_s=SECONDS)
    if verdict.status != "fail":  # such as a timeout
        raise RuntimeError(f"{verdict.status}: {verdict.detail}")
    return verdict.detail.removeprefix("AssertionError").removeprefix(": ").rstrip() or "(nothing was printed)"
