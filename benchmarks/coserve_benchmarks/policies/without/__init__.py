"""Alternatives to coserve with transformers and PEFT, each at its best settings here.

Two processes on the same cores (`twoprocess`), or one that stops serving to train (`onestops`). All of them
are children: `launch` starts them, `process` is what runs in them, `messages` what both sides say.
"""
