"""What tests share: real servers, real processes, and ways to wait that do not rest on luck."""
