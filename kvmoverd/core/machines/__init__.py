"""One pure state machine per kind of request: completions in, actions out.

A machine never awaits, logs or reads a clock. Every method returns the actions that its caller owes from now on; each
machine emits exactly one `Finish` and, when it holds slots, exactly one `Release`. Events that come after the end, late
or twice, return no action.
"""
