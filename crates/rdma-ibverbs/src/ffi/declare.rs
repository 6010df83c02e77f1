//! Macros for declarations.

/// Declares constants of an enumeration, in a module that is called like the enumeration.
macro_rules! enumeration {
    ($($name:ident: $type:ident { $($constant:ident = $value:expr,)* })*) => {
        $(
            pub mod $name {
                pub type Type = std::ffi::$type;
                $(pub const $constant: Type = $value;)*
                #[cfg(test)]
                pub(in $crate::ffi) const CONSTANTS: $crate::ffi::tests::Constants =
                    &[$((stringify!($constant), $constant as i64)),*];
            }
        )*
    };
}

/// Declares an enumeration whose constants are bits.
macro_rules! flags {
    ($($name:ident { $($constant:ident = $value:expr,)* })*) => {
        $(
            #[repr(transparent)]
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            pub struct $name(pub std::ffi::c_uint);

            impl $name {
                $(pub const $constant: Self = Self($value);)*
                #[cfg(test)]
                pub(in $crate::ffi) const CONSTANTS: $crate::ffi::tests::Constants =
                    &[$((stringify!($constant), Self::$constant.0 as i64)),*];
            }

            impl std::ops::BitOr for $name {
                type Output = Self;

                fn bitor(self, other: Self) -> Self {
                    Self(self.0 | other.0)
                }
            }

            impl std::ops::BitOrAssign for $name {
                fn bitor_assign(&mut self, other: Self) {
                    self.0 |= other.0;
                }
            }

            impl std::ops::BitAnd for $name {
                type Output = Self;

                fn bitand(self, other: Self) -> Self {
                    Self(self.0 & other.0)
                }
            }
        )*
    };
}

/// Declares structures and unions of C.
macro_rules! structures {
    ($($kind:ident $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $(pub $field: $type,)*
            }

            #[cfg(test)]
            #[allow(dead_code, reason = "unnamed unions have no counterpart in C")]
            impl $name {
                pub(in $crate::ffi) const LAYOUT: $crate::ffi::tests::Layout =
                    $crate::ffi::tests::Layout {
                        name: stringify!($name),
                        size: size_of::<Self>(),
                        fields: &[$((stringify!($field), std::mem::offset_of!(Self, $field))),*],
                    };
            }
        )*
    };
}

/// Declares functions of a library.
macro_rules! functions {
    (
        $library:ident:
        $(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?;)*
    ) => {
        $(
            /// See the manual page.
            ///
            /// # Safety
            ///
            /// Handles are alive, and pointers valid, as the manual page requires.
            #[inline]
            pub unsafe fn $name($($argument: $type),*) $(-> $result)? {
                type Function = unsafe extern "C" fn($($type),*) $(-> $result)?;
                static FOUND: $crate::ffi::library::Cache<Function> =
                    $crate::ffi::library::Cache::new();
                // SAFETY: S3: the header declares this type.
                let found = unsafe {
                    $crate::ffi::Library::$library
                        .cached(&FOUND, concat!(stringify!($name), "\0"))
                };
                match found {
                    // SAFETY: S3: the caller's promise.
                    Some(function) => unsafe { function($($argument),*) },
                    None => $crate::ffi::library::Missing::missing(),
                }
            }
        )*
    };
}
