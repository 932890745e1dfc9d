"""The scheduler process: which requests run, on which KV pages; the model's forward; outputs to the detokenizer.

`loop.py` is the whole story on one screen; the managers beside it hold one noun each.
"""
