//! Macros for declarations. `in LIST` names a list of them, which a test compares with C.

/// Declares constants of an enumeration, in a module that is called like the enumeration.
macro_rules! enumeration {
    (in $list:ident; $($name:ident: $type:ident { $($constant:ident = $value:expr,)* })*) => {
        #[cfg(test)]
        pub(in $crate::ffi) const $list: &[$crate::ffi::tests::Constants] =
            &[$($name::CONSTANTS),*];

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
    (in $list:ident; $($name:ident { $($constant:ident = $value:expr,)* })*) => {
        #[cfg(test)]
        pub(in $crate::ffi) const $list: &[$crate::ffi::tests::Constants] =
            &[$($name::CONSTANTS),*];

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
    (
        in $list:ident;
        $($(#[$doc:meta])* $kind:ident $name:ident { $($field:ident: $type:ty,)* })*
    ) => {
        #[cfg(test)]
        pub(in $crate::ffi) const $list: &[$crate::ffi::tests::Layout] = &[$($name::LAYOUT),*];

        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $(pub $field: $type,)*
            }

            #[cfg(test)]
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
                const NAME: &std::ffi::CStr =
                    $crate::ffi::library::name(concat!(stringify!($name), "\0"));
                static FOUND: $crate::ffi::library::Cache<Function> =
                    $crate::ffi::library::Cache::new();
                let library = $crate::ffi::Library::$library;
                // SAFETY: S3: the header declares this type.
                let found = unsafe { library.cached(&FOUND, NAME) };
                match found {
                    // SAFETY: S3: the caller's promise.
                    Some(function) => unsafe { function($($argument),*) },
                    None => $crate::ffi::library::Missing::missing(),
                }
            }
        )*
    };
}
