"""Our policies inside other engines. Each adapter translates the engine's calls and asks the same policy objects."""
