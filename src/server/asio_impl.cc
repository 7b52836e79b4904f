// clang-format off
#include "server/asio.h"  // first: it says that the definitions are compiled here

#include <boost/asio/impl/src.hpp>
#include <boost/beast/http/impl/error.ipp>
#include <boost/beast/src.hpp>
