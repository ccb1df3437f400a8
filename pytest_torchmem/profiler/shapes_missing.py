META_FUNCTIONS: dict = {}
