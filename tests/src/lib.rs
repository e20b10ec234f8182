//! End-to-end tests on real programs; see the files in `tests/`.
