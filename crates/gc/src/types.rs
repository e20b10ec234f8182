//! The types of a heap: their numbers, by which objects name them, and their layouts.

use crate::error::GcError;
use crate::object::Referent;
use core::any::{TypeId, type_name};
use farfield_core::gc::{LayoutTable, TypeLayout};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// All types of which a heap has had objects.
#[derive(Default)]
pub(crate) struct TypeRegistry(Mutex<RegisteredTypes>);

#[derive(Default)]
struct RegisteredTypes {
    known: HashMap<TypeId, (u32, TypeLayout)>,
    table: LayoutTable,
}

impl TypeRegistry {
    fn lock(&self) -> MutexGuard<'_, RegisteredTypes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number and the layout of objects that references to `T` lead to.
    pub(crate) fn of<T: Referent + ?Sized>(&self) -> Result<(u32, TypeLayout), GcError> {
        let mut types = self.lock();
        if let Some(known) = types.known.get(&TypeId::of::<T>()) {
            return Ok(known.clone());
        }
        let layout = T::layout().map_err(|reason| GcError::Type { type_name: type_name::<T>(), reason })?;
        let number = types.table.add(layout.clone()).ok_or(GcError::TypesFull)?;
        types.known.insert(TypeId::of::<T>(), (number, layout.clone()));
        Ok((number, layout))
    }

    /// Returns the number of a type, if it has one.
    pub(crate) fn number_of<T: Referent + ?Sized>(&self) -> Option<u32> {
        self.lock().known.get(&TypeId::of::<T>()).map(|(number, _)| *number)
    }

    /// Returns the layouts of all types.
    pub(crate) fn table(&self) -> LayoutTable {
        self.lock().table.clone()
    }
}
