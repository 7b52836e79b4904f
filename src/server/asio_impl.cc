#include <boost/asio/impl/src.hpp>
#include <boost/beast/http/impl/error.ipp>
#include <boost/beast/src.hpp>

#include "server/asio.h"
