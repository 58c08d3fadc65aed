"""Our decode loop inside other engines: each adapter translates, then calls the same policy."""
