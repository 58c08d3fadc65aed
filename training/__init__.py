"""How a head is made: prompts → responses → coupled traces → a trained head."""

if __name__ != "accept_head.training":
    raise ImportError("import this package as accept_head.training: the folder is only where its source lives")
