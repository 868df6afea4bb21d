//! Enums that messages and journals encode as a number.

/// Defines an enum that is encoded as a number. Each value has a row with its number,
/// which never changes, and its name in documents and logs.
macro_rules! numbered {
    (
        $(#[$doc:meta])*
        $name:ident: $number:ident {
            $( $(#[$row:meta])* $variant:ident = $value:literal, $text:literal; )*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $( $(#[$row])* $variant, )*
        }

        impl $name {
            /// Every value, ordered by number.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name in documents and logs.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $text, )*
                }
            }

            /// The number in messages or journals.
            #[must_use]
            pub fn to_wire(self) -> $number {
                match self {
                    $( Self::$variant => $value, )*
                }
            }

            pub(crate) fn from_wire(number: $number) -> Option<Self> {
                match number {
                    $( $value => Some(Self::$variant), )*
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str(self.name())
            }
        }
    };
}
pub(crate) use numbered;
