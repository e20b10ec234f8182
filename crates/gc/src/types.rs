//! The types of a heap: their numbers, by which objects name them, and their layouts.

use crate::error::GcError;
use crate::object::Referent;
use core::any::{TypeId, type_name};
use farfield_core::gc::{LayoutTable, TypeLayout};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All types of which a heap has had objects.
#[derive(Default)]
pub(crate) struct TypeRegistry(Mutex<RegisteredTypes>);

#[derive(Default)]
struct RegisteredTypes {
    known: HashMap<TypeId, ObjectType>,
    table: LayoutTable,
}

/// Type of an object: its number and its layout.
#[derive(Clone)]
pub(crate) struct ObjectType {
    pub(crate) number: u32,
    pub(crate) layout: Arc<TypeLayout>,
}

impl TypeRegistry {
    fn lock(&self) -> MutexGuard<'_, RegisteredTypes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the type of objects that references to `T` lead to.
    pub(crate) fn of<T: Referent + ?Sized>(&self) -> Result<ObjectType, GcError> {
        let mut types = self.lock();
        if let Some(known) = types.known.get(&TypeId::of::<T>()) {
            return Ok(known.clone());
        }
        let layout = T::layout().map_err(|reason| GcError::Type { type_name: type_name::<T>(), reason })?;
        let number = types.table.add(layout.clone()).ok_or(GcError::TypesFull)?;
        let made = ObjectType { number, layout: Arc::new(layout) };
        types.known.insert(TypeId::of::<T>(), made.clone());
        Ok(made)
    }

    /// Returns the layouts of all types.
    pub(crate) fn table(&self) -> LayoutTable {
        self.lock().table.clone()
    }
}
