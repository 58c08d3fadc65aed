"""Our policies inside an unmodified vLLM, by its plugin mechanism.

`plugin` is what vLLM loads; it swaps two classes in. `settings` says what the user asked for and what cannot be had;
`host` runs a policy round by round for a draft loop that is not ours, `rule` works out a head's on the host; `v1` and
`v2` tie it to vLLM's two model runners.
`adaptive` feeds a head to vLLM's adaptive verification. `metrics` counts. Only `v1`, `v2` and `adaptive` import vLLM.
"""
