//! The tests of the library, in one program: it is built and linked once. `FARFIELD_PLANE` names the plane (`page`, `object` or
//! `hybrid`), for all but those of `one_plane`.

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
mod flat_map;
mod in_place;
mod lies;
mod list;
mod many;
mod map;
mod object_flights;
mod once;
mod one_plane;
mod rest;
mod room;
mod sets;
mod switch;
mod tasks;
mod tokio;
mod user_code;
mod vacancies;
mod vec;
mod weaks;
