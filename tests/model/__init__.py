"""A model of the protocol that is checked exhaustively: see docs/explanation/model.md."""
