//! The tests of the library, on the page plane where they do not say which. One program: it is built and linked once.
//! Those that hold on each plane are repeated by `heap_object` and `heap_hybrid`.

#[path = "../common/mod.rs"]
mod common;

mod aifm;
mod arcs;
mod array;
mod async_collections;
mod boxes;
mod btree;
mod bytes;
mod drops;
mod faults;
mod fetch;
mod guide;
mod hybrid;
mod large;
mod lies;
mod list;
mod many;
mod map;
mod objects;
mod once;
mod places;
mod rest;
mod room;
mod switch;
mod tasks;
mod tokio;
mod user_code;
mod vacancies;
mod vec;
