"""Our policies inside an unmodified vLLM, through its plugin mechanism.

vLLM loads `plugin`, which replaces some of its classes. `settings` reads the user's settings and refuses unsupported
ones. `host` asks a policy round by round from vLLM's draft loop; `v1` and `v2` connect it to the two model runners.
`adaptive` uses a head in vLLM's adaptive verification. `metrics` counts. Only `v1`, `v2` and `adaptive` import vLLM.
"""
