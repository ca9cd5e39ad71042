"""What all tests need."""

import signal

# A shell without job control has what it starts in the background ignore Ctrl-C, and so would each process
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
