//! Every test that holds on each plane, on the object plane and, by the name of a link to this folder, on the hybrid plane.

#[path = "../common/mod.rs"]
mod common;

#[path = "../heap/aifm.rs"]
mod aifm;
#[path = "../heap/arcs.rs"]
mod arcs;
#[path = "../heap/array.rs"]
mod array;
#[path = "../heap/async_collections.rs"]
mod async_collections;
#[path = "../heap/boxes.rs"]
mod boxes;
#[path = "../heap/btree.rs"]
mod btree;
#[path = "../heap/bytes.rs"]
mod bytes;
#[path = "../heap/drops.rs"]
mod drops;
#[path = "../heap/faults.rs"]
mod faults;
#[path = "../heap/fetch.rs"]
mod fetch;
#[path = "../heap/lies.rs"]
mod lies;
#[path = "../heap/list.rs"]
mod list;
#[path = "../heap/many.rs"]
mod many;
#[path = "../heap/map.rs"]
mod map;
#[path = "../heap/object_flights.rs"]
mod object_flights;
#[path = "../heap/once.rs"]
mod once;
#[path = "../heap/rest.rs"]
mod rest;
#[path = "../heap/room.rs"]
mod room;
#[path = "../heap/switch.rs"]
mod switch;
#[path = "../heap/tasks.rs"]
mod tasks;
#[path = "../heap/tokio.rs"]
mod tokio;
#[path = "../heap/user_code.rs"]
mod user_code;
#[path = "../heap/vacancies.rs"]
mod vacancies;
#[path = "../heap/vec.rs"]
mod vec;
