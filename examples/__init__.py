"""One folder per idea; each is run by the tests."""
