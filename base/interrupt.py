"""Ctrl-C ends the process at once, without a traceback: what a command imports first.

Python imports torch for seconds, and in that time Ctrl-C would print a traceback of the import. A shell sees
exit code 130. `run_command` then sets a handler that raises KeyboardInterrupt again.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:       # else it is ignored, as by `&`
    signal.signal(signal.SIGINT, signal.SIG_DFL)
